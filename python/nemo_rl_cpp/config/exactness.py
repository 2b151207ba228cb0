"""How far generation and training are apart, by the code that does them. docs/transformers.md and docs/vllm.md measure it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .engines import FOREIGN_ENGINES

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
    from nemo_rl_cpp.config.policy import PolicyConfig


class Exactness(NamedTuple):
    """A row of the table.

    Attributes:
        equal: whether a token has the same log-probability in generation and training, to the bit.
        text: the rest of the sentence.
    """

    equal: bool
    text: str


_VLLM = Exactness(
    False,
    "another engine with weights of its own, whose digest is compared at each refit: the trainer scores each batch before it trains on it, "
    "and token_mult_prob_error and gen_kl_error say how far apart they were (about 1e-5 in float32, 0.01 and more in bfloat16)",
)
EXACTNESS: dict[tuple[str, str], Exactness] = {
    ("native", "native"): Exactness(True, "one computation: token_mult_prob_error is 1 and max_logprob_gap 0"),
    ("hf", "hf"): Exactness(
        False,
        "two computations on the same weights: the trainer scores each batch before it trains on it, and token_mult_prob_error and "
        "gen_kl_error say how far apart they were",
    ),
    ("native", "vllm"): _VLLM,
    ("hf", "vllm"): _VLLM,
}
"""(trainer, generator) -> what is to be expected."""


def engine_name(policy: PolicyConfig) -> str:
    """The engine that generates: the one of the trainer stands in for NeMo RL's, but for a vLLM that is there."""
    backend = policy.generation.backend
    if policy.generation.runs_vllm:
        return "vllm"
    return policy.backend if backend is None or backend in FOREIGN_ENGINES else backend


def exactness_of(policy: PolicyConfig) -> Exactness | None:
    """The row of a policy; None for a pair that cannot be."""
    return EXACTNESS.get((policy.backend, engine_name(policy)))


def exactness_text(config: WholeConfig) -> str | None:
    """One line for the terminal; None for an evaluation, which trains nothing."""
    if not hasattr(config, "policy") or (row := exactness_of(config.policy)) is None:
        return None
    how = "equal to the bit" if row.equal else "equal up to rounding"
    text = f"generation ({engine_name(config.policy)}) and training ({config.policy.backend}) are {how}: {row.text}"
    correction = correction_text(config)
    return text if correction is None else f"{text}; {correction}"


def correction_text(config: TrainMasterConfig) -> str | None:
    """Why loss_fn.use_importance_sampling_correction is on, where the configuration leaves it open; None where it does not."""
    row = exactness_of(config.policy)
    if row is None or row.equal or not config.loss_fn.correction_left_open:
        return None
    return "loss_fn.use_importance_sampling_correction was left open and is true because of that"
