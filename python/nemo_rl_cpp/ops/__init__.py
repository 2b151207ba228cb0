"""Typed entry points of the native core; the names equal the C++ names.

Advantages: csrc/kernels/{group_baseline,reinforce_plus_plus,gae,masked_reduce}.h. Masks may have any dtype and hold 0
and 1. A masked position never influences a valid token's advantage. Per-token tensors are [B, S]; with `offsets`, int64
[B + 1], they are [T], without padding (`RaggedBatch`), and the results are bit-identical.

Losses: value, gradient and metrics in one pass, by the formulas of csrc/kernels/clipped_pg_loss.h.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C

RatioMode = Literal[
    "ppo", "reinforce", "cispo", "on_policy", "sapo", "dppo_tv", "dppo_kl", "dro", "gmpo", "vespo", "kl_cov"
]
ImportanceSampling = Literal["none", "full", "tis", "icepop", "seq-mask-tis"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]
_TRUNCATED = ("tis", "icepop", "seq-mask-tis")
_METRIC_NAMES: list[str] = C.clipped_pg_metric_names()


class GroupBaseline(NamedTuple):
    """Baseline and standard deviation of each sample's group, both [B]."""

    baseline: Tensor
    std: Tensor


class TokenAdvantages(NamedTuple):
    """Advantages and returns, [B, S] or [T]. `degenerate`: too few valid tokens to whiten, so the advantages are 0."""

    advantages: Tensor
    returns: Tensor | None
    degenerate: bool


def group_ids_from_prompts(prompts: Tensor) -> Tensor:
    """Return int64 [B] on the CPU: for each row of `prompts` [B, L] (or [B]) the index of the first equal row."""
    return C.group_ids_from_prompts(prompts)


def group_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid_mask: Tensor | None = None,
    leave_one_out: bool = True,
    std_rewards: Tensor | None = None,
) -> GroupBaseline:
    """Return mean and unbiased std of the valid rewards per group, without the sample itself if leave_one_out.

    All arguments are [B]. `std_rewards` replaces the rewards in the std only. A group with at most one valid sample
    gives (its reward, 0). Computed in float64 in two passes: equal rewards give std exactly 0.
    """
    return GroupBaseline(*C.group_baseline(rewards, group_ids, valid_mask, leave_one_out, std_rewards))


def grpo_advantages(rewards: Tensor, baseline: Tensor, std: Tensor, *, normalize: bool) -> Tensor:
    """Return [B]: reward - baseline, divided by (std + 1e-6) if `normalize` and std > 0."""
    return C.grpo_advantages(rewards, baseline, std, normalize)


def gdpo_advantages(components: Tensor, weights: Tensor) -> Tensor:
    """Return [B]: the sum of component advantages [K, B] by weights [K], centred and divided by its unbiased std."""
    return C.gdpo_advantages(components, weights)


def reinforce_plus_plus(
    advantages: Tensor,
    mask: Tensor,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    offsets: Tensor | None = None,
) -> TokenAdvantages:
    """Return advantage[b] - kl_coef K[b, t], whitened over the valid tokens of the batch (biased variance, at least
    1e-8); 0 at masked positions. advantages [B] float32 or float64, mask and log-probs [B, S].
    """
    values, degenerate = C.reinforce_plus_plus(
        _real(advantages), mask, logprobs, reference_logprobs, kl_coef, kl_type, offsets
    )
    return TokenAdvantages(values, None, degenerate)


def raw_reward(rewards: Tensor, mask: Tensor, *, normalize: bool, offsets: Tensor | None = None) -> TokenAdvantages:
    """Return the reward [B] on every token, whitened over the valid tokens if `normalize`."""
    values, degenerate = C.raw_reward(_real(rewards), mask, normalize, offsets)
    return TokenAdvantages(values, None, degenerate)


@dataclass(frozen=True)
class GAEConfig:
    """The settings of `gae`. gae_lambda_value is a separate lambda for the returns, computed in a second pass.
    length_adaptive_alpha > 0 replaces gae_lambda by clamp(1 - 1/max(alpha * length, 1), 0, 1) per row. `normalize`
    whitens the advantages over all valid tokens."""

    gamma: float
    gae_lambda: float
    gae_lambda_value: float | None = None
    length_adaptive_alpha: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "k3"
    normalize: bool = False


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    config: GAEConfig,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    offsets: Tensor | None = None,
) -> TokenAdvantages:
    """Return generalized advantage estimates over the valid tokens of each row, computed from last to first.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lambda A_next,   returns_t = A_t + V_t

    "next" is the next valid token (0 after the last); r_t is -kl_coef K_t, plus rewards[b] at the row's last valid
    token. rewards [B]; values, mask and log-probs are per-token. Advantages are 0 at masked positions.
    """
    decoupled = config.gae_lambda_value is not None
    lambda_value = config.gae_lambda_value if decoupled else config.gae_lambda
    return TokenAdvantages(
        *C.gae(
            rewards, _real(values), mask, logprobs, reference_logprobs, config.gamma, config.gae_lambda, lambda_value, decoupled,
            config.length_adaptive_alpha, config.kl_coef, config.kl_type, config.normalize, offsets,
        )
    )  # fmt: skip


def _real(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


@dataclass(frozen=True)
class ClippedPGConfig:
    """The settings of clipped_pg_loss. Related flags of NeMo RL's `loss_fn` are merged into one setting.

    ratio_mode: ppo (clipped ratio), reinforce (no ratio), on_policy (the ratio is 1 and prev is curr), or the named
        loss, see csrc/kernels/clipped_pg_loss.h.
    fixed_length: with token_level_loss false, divide a row's sum by this number, not by its token count; 0: off.
    importance_sampling: none, full, tis (clamped), icepop (zeroed outside the bounds), seq-mask-tis (whole rows).
    importance_level: the weight of a token, or one for the row: the product of its weights, or their geometric mean.

    ratio_clip_c None or a clamp value None disables that part. kl_penalty 0 reads no reference log-probs. Contradictory
    settings raise ValueError at the first call of clipped_pg_loss.
    """

    ratio_mode: RatioMode = "ppo"
    token_level_loss: bool = True
    fixed_length: float = 0.0
    sequence_level_ratios: bool = False
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    kl_penalty: float = 0.0
    kl_type: KlEstimator = "k3"
    kl_input_clamp: float | None = 20.0
    kl_output_clamp: float | None = 10.0
    use_on_policy_kl_approximation: bool = False
    importance_sampling: ImportanceSampling = "none"
    importance_level: ImportanceLevel = "token"
    importance_min: float = 0.0
    importance_max: float = 0.0
    positive_nll_weight: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    dro_beta: float = 0.1
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @cached_property
    def native(self) -> C.ClippedPGConfig:
        """The C++ struct."""
        out = C.ClippedPGConfig()
        for field in fields(self):
            if field.name not in ("ratio_clip_c", "kl_input_clamp", "kl_output_clamp"):  # None is a number in C++
                setattr(out, field.name, getattr(self, field.name))
        out.dual_clip = self.ratio_clip_c is not None
        out.ratio_clip_c = self.ratio_clip_c if self.ratio_clip_c is not None else 0.0
        out.kl_input_clamp = _clamp(self.kl_input_clamp)
        out.kl_output_clamp = _clamp(self.kl_output_clamp)
        return out

    @property
    def truncates(self) -> bool:
        return self.importance_sampling in _TRUNCATED


def _clamp(value: float | None) -> float:
    return math.inf if value is None else value


@dataclass(frozen=True)
class ClippedPGInputs:
    """The inputs of the loss in addition to the current log-probabilities.

    [B, S], unshifted: advantages, token_mask, and the log-probabilities of generation, of the old policy (`prev`; not
    read by `on_policy`) and of the reference (read with a kl_penalty). [B]: sample_mask, rewards (read with a
    positive_nll_weight). curr_logprobs_unfiltered [B, S-1] replaces curr_logprobs in the KL term. kl_cov_penalty [B, S]
    weighs |curr - prev| under kl_cov.
    """

    advantages: Tensor
    generation_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    prev_logprobs: Tensor | None = None
    reference_policy_logprobs: Tensor | None = None
    rewards: Tensor | None = None
    curr_logprobs_unfiltered: Tensor | None = None
    kl_cov_penalty: Tensor | None = None


@dataclass(frozen=True)
class LossCounts:
    """Counts over the global batch: valid tokens, valid sequences, and valid tokens of samples with a positive reward.
    With them the values of micro-batches add up. A count that is None is replaced by the micro-batch's count."""

    valid_toks: Tensor | float | None = None
    valid_seqs: Tensor | float | None = None
    valid_positive_toks: Tensor | float | None = None

    def scalars(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _scalar(self.valid_toks), _scalar(self.valid_seqs), _scalar(self.valid_positive_toks)


class ClippedPGResult(NamedTuple):
    """Loss (scalar tensor), its gradients, metrics as floats, the first non-finite (sample, token) or None, and the sum
    over valid tokens that underlies the metric `token_mult_prob_error`. grad_entropy [B, S-1]: the gradient with
    respect to the entropies, if the loss has an entropy bonus; grad_candidates [B, S-1, k]: to the log-probabilities of
    the candidates, under score centering."""

    loss: Tensor
    grad_logprobs: Tensor
    grad_unfiltered: Tensor | None
    metrics: dict[str, float]
    nonfinite: tuple[int, int] | None
    mult_prob_error_sum: float
    grad_entropy: Tensor | None = None
    grad_candidates: Tensor | None = None


def clipped_pg_loss(
    curr_logprobs: Tensor,
    inputs: ClippedPGInputs,
    counts: LossCounts = LossCounts(),
    config: ClippedPGConfig = ClippedPGConfig(),
) -> ClippedPGResult:
    """Return the clipped policy-gradient loss with its gradient and all metrics.

        loss = reduce(W C) + beta reduce(K) + mu NLL,   C = max(-A R, -A clamp(R)),   R = exp(curr - prev)

    curr_logprobs [B, S-1] (column t is the log-prob of token t+1), float32 or float64.

    Positions with token_mask or sample_mask 0 have no effect and get gradient 0. Raises ValueError for a missing input,
    a wrong shape or a contradictory config. A non-finite term does not raise an error: `nonfinite` reports it.
    """
    loss, grad, grad_unfiltered, values = C.clipped_pg_loss(
        curr_logprobs, inputs.advantages, inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_policy_logprobs,
        inputs.token_mask, inputs.sample_mask, inputs.kl_cov_penalty, inputs.curr_logprobs_unfiltered, inputs.rewards, *counts.scalars(), config.native,
    )  # fmt: skip
    metrics = dict(zip(_METRIC_NAMES, values.tolist(), strict=True))
    sample, token = int(metrics.pop("nonfinite_sample")), int(metrics.pop("nonfinite_token"))
    error_sum = metrics.pop("token_mult_prob_error_sum")
    if not config.truncates:
        del metrics["is_oob_ratio"]
    return ClippedPGResult(loss, grad, grad_unfiltered, metrics, None if sample < 0 else (sample, token), error_sum)


def token_loss(
    inputs: ClippedPGInputs, counts: LossCounts, config: ClippedPGConfig = ClippedPGConfig()
) -> C.TokenLoss | None:
    """Return `clipped_pg_loss` for a head that evaluates it while it holds a token's logits
    (`Trainer.forward_with_loss`).

    `counts` must have tokens and sequences. prev_logprobs None: the log-probabilities being computed are used. Return
    None if a token's gradient depends on other tokens: sequence-level losses and seq-mask-tis.
    """
    if not C.TokenLoss.separable(config.native):
        return None
    return C.TokenLoss(
        inputs.advantages, inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_policy_logprobs, inputs.token_mask,
        inputs.sample_mask, inputs.kl_cov_penalty, inputs.rewards if counts.valid_positive_toks is not None else None, *counts.scalars(), config.native,
    )  # fmt: skip


def _scalar(value: Tensor | float | None) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(float(value), dtype=torch.float64)


_VALUE_METRIC_NAMES: list[str] = C.value_loss_metric_names()


class ValueLossResult(NamedTuple):
    """Loss (scalar tensor), its gradient [B, S], metrics as floats, the first non-finite (sample, token) or None."""

    loss: Tensor
    grad_values: Tensor
    metrics: dict[str, float]
    nonfinite: tuple[int, int] | None


def mse_value_loss(
    values: Tensor,
    *,
    returns: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    old_values: Tensor | None = None,
    global_valid_toks: Tensor | float | None = None,
    scale: float = 1.0,
    cliprange: float | None = None,
) -> ValueLossResult:
    """Return scale/2 * sum(M e) / global_valid_toks with e = (v - R)^2, or with a cliprange the maximum of that and
    (clamp(v, old +- cliprange) - R)^2. values, returns, old_values, token_mask [B, S] (unshifted), sample_mask [B].

    The metrics values_min and values_max are over valid tokens (0 if there are none).
    """
    if cliprange and cliprange > 0 and old_values is None:
        raise ValueError("cliprange is set but the old values are missing: give `values` in the data")
    loss, grad, numbers = C.mse_value_loss(
        values,
        returns,
        old_values,
        token_mask,
        sample_mask,
        _scalar(global_valid_toks),
        scale,
        max(cliprange or 0.0, 0.0),
    )
    metrics = dict(zip(_VALUE_METRIC_NAMES, numbers.tolist(), strict=True))
    sample, token = int(metrics.pop("nonfinite_sample")), int(metrics.pop("nonfinite_token"))
    return ValueLossResult(loss, grad, metrics, None if sample < 0 else (sample, token))
