"""Tinker's built-in losses: sums over tokens, computed from log-probabilities and the other inputs of a datum."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nemo_rl_cpp.tinker.types import UserError

Inputs = Mapping[str, Tensor]
"""Tensors [targets] by name: `loss_fn_inputs`, the configuration of a loss, and `row`, the index of each target's datum."""
Loss = Callable[[Tensor, Inputs], Tensor]


def _ppo(logprobs: Tensor, given: Inputs, ratio: Tensor | None = None) -> Tensor:
    """Compute PPO's clipped loss. The ratio of each token is exp(logprobs - old logprobs), unless it is given."""
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
    """Compute GSPO-token (Zheng et al., 2025, https://arxiv.org/abs/2507.18071). A token's ratio has the value of the
    sequence's ratio, the geometric mean over the tokens marked by `sequence_ratio_mask`. Its gradient is that of the
    token's own ratio."""
    row, mask = given["row"], (given["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    sums = torch.zeros(int(row.max()) + 1, dtype=logprobs.dtype).index_add(
        0, row, (logprobs.detach() - given["logprobs"]) * mask
    )
    mean = sums / torch.zeros_like(sums).index_add(0, row, mask)
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
    """Return (loss function, names of its inputs, its configuration with defaults). Raise UserError for an unknown loss
    or key."""
    if name not in LOSSES:
        raise UserError(f"the loss {name!r} is not here: take one of {', '.join(LOSSES)}, or forward_backward_custom")
    loss, needed, defaults = LOSSES[name]
    for key, value in config.items():
        if key not in defaults:
            raise UserError(f"{name} has no {key!r} in loss_fn_config: expected {', '.join(defaults) or 'nothing'}")
        if not isinstance(value, float):
            raise UserError(f"loss_fn_config[{key!r}] is {value!r}, expected a number")
    return loss, needed, {**defaults, **config}
