"""The arguments and results of the clients, with the names and fields of the SDK's `tinker.types`, whose objects are
accepted, too. The built-in losses are sums over tokens, of log-probabilities and a datum's other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_cpp.argument_checks import LARGEST, number, token_ids, whole_number


class ModelInput(Protocol):
    """The tokens of a sequence, as in the SDK."""

    def to_ints(self) -> list[int]: ...


Tokens = Sequence[int] | ModelInput
_MOST_SAMPLES = 1024


@dataclass
class Datum:
    """A training sequence: N input tokens, and tensors or lists [N] by name, of which `target_tokens` holds the token
    that follows each input token."""

    model_input: Tokens
    loss_fn_inputs: Mapping[str, Tensor | Sequence[float]]


@dataclass
class AdamParams:
    """The settings of one AdamW step. With `grad_clip_norm` 0, the gradient is not clipped."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass
class SamplingParams:
    """The parameters of sampling a response.

    Attributes:
        max_tokens: the most tokens of a response; None: as many as the model allows.
        seed: the seed of sampling; None: the number of the request is the seed.
        stop: strings or tokens that end a response, in addition to the model's stop tokens; []: only the length limit
            ends it.
        top_k: number of most likely tokens to sample from; -1: all tokens."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass
class SampleRequest:
    """A request for samples of one prompt, with the options of `SamplingClient.sample`."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0

    def __post_init__(self) -> None:
        whole_number("num_samples", self.num_samples, 1, _MOST_SAMPLES)


@dataclass
class ForwardBackwardOutput:
    """The result of `forward` and `forward_backward`: for each datum {"logprobs": the log-probabilities of its targets,
    float32 [N]}, and the loss, as the metric `loss:sum`."""

    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


@dataclass
class SampledSequence:
    """One response. `stop_reason` is "stop", or "length" at the length limit. `topk_logprobs` lists the (token,
    log-probability) pairs of the most likely tokens at each position."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = "length"
    topk_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)


@dataclass
class SampleResponse:
    """The responses to a prompt, with the log-probability of each prompt token (None for the first and for tokens not
    requested), and in `topk_prompt_logprobs` a list of (token, log-probability) of the most likely tokens at each
    position of the prompt."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[Sequence[tuple[int, float]] | None] | None = None


def tokens_of(given: Tokens, what: str) -> list[int]:
    """Return a prompt or input, called `what`, as tokens. Raise ValueError for a text, an image or audio."""
    if not hasattr(given, "to_ints"):
        return token_ids(what, given)
    try:
        return given.to_ints()
    except ValueError:
        raise ValueError(f"{what} holds something else than tokens: images and audio are not here") from None


Inputs = Mapping[str, Tensor]
"""Tensors [targets] by name: `loss_fn_inputs`, the configuration of a loss, and `row`, the index of each target's datum."""
Loss = Callable[[Tensor, Inputs], Tensor]


def _ppo(logprobs: Tensor, given: Inputs, ratio: Tensor | None = None) -> Tensor:
    """Return PPO's clipped loss, summed over the targets. The ratio is exp(new - old log-probability) unless given."""
    ratio = torch.exp(logprobs - given["logprobs"]) if ratio is None else ratio
    clipped = torch.clamp(ratio, given["clip_low_threshold"], given["clip_high_threshold"])
    return -torch.minimum(ratio * given["advantages"], clipped * given["advantages"]).sum()


def _cispo(logprobs: Tensor, given: Inputs) -> Tensor:
    ratio = torch.exp(logprobs - given["logprobs"])
    clipped = torch.clamp(ratio, given["clip_low_threshold"], given["clip_high_threshold"])
    return -(clipped.detach() * logprobs * given["advantages"]).sum()


def _dro(logprobs: Tensor, given: Inputs) -> Tensor:
    distance = (logprobs - given["logprobs"]) ** 2
    return -(logprobs * given["advantages"] - 0.5 * given["beta"] * distance).sum()


def _gspo(logprobs: Tensor, given: Inputs) -> Tensor:
    """Return the loss of GSPO-token (https://arxiv.org/abs/2507.18071), summed over the targets. Each token's ratio is
    the geometric mean of its sequence's ratios where `sequence_ratio_mask` is set, with the token's own gradient."""
    row, mask = given["row"], (given["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    differences = (logprobs.detach() - given["logprobs"]) * mask
    sums = torch.zeros(int(row.max()) + 1, dtype=logprobs.dtype).index_add(0, row, differences)
    mean = sums / torch.zeros_like(sums).index_add(0, row, mask).clamp(min=1)  # 0 for a sequence without a ratio
    return _ppo(logprobs, given, torch.exp(mean[row] + logprobs - logprobs.detach()))


_OF_SAMPLES = ("logprobs", "advantages")
LOSSES: dict[str, tuple[Loss, tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (lambda logprobs, given: -(given["weights"] * logprobs).sum(), ("weights",), {}),
    "importance_sampling": (
        lambda logprobs, given: -(torch.exp(logprobs - given["logprobs"]) * given["advantages"]).sum(),
        _OF_SAMPLES,
        {},
    ),
    "ppo": (_ppo, _OF_SAMPLES, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": (_cispo, _OF_SAMPLES, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": (_gspo, (*_OF_SAMPLES, "sequence_ratio_mask"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "dro": (_dro, _OF_SAMPLES, {"beta": 0.05}),
}
"""Name -> (function, required inputs of a datum, keys of `loss_fn_config` with defaults; a datum may also set these)."""
FACTORS = {"cross_entropy": "weights"} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "gspo"), "advantages")
"""Name -> the input that multiplies each target's gradient, which is 0 where the input is 0. `dro` has none."""


def loss_of(name: str, config: Mapping[str, float | str]) -> tuple[Loss, tuple[str, ...], dict[str, float]]:
    """Return (loss, its required inputs, its configuration with defaults). Raise ValueError if a name is unknown."""
    if name not in LOSSES:
        raise ValueError(f"the loss {name!r} is not here: take one of {', '.join(LOSSES)}, or forward_backward_custom")
    loss, needed, defaults = LOSSES[name]
    for key in config:
        if key not in defaults:
            raise ValueError(f"{name} has no {key!r} in loss_fn_config: expected {', '.join(defaults) or 'nothing'}")
    given = {key: number(f"loss_fn_config[{key!r}]", value, -LARGEST, LARGEST) for key, value in config.items()}
    return loss, needed, {**defaults, **given}
