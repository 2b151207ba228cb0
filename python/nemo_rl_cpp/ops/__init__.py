"""Typed entry points of the native core, under the names of the C++ functions.

Advantages are computed by csrc/kernels/{group_baseline,reinforce_plus_plus,gae,masked_reduce}.h. Masks hold 0 and 1 in
any dtype. A masked position never influences a valid token's advantage. Per-token tensors are [B, S]. If `offsets`
(int64 [B + 1]) are given, they are [T], without padding (`RaggedBatch`); the results are bit-identical.

Losses return value, gradient and metrics from one pass, by the formulas of csrc/kernels/clipped_pg_loss.h."""

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
_METRIC_NAMES: list[str] = C.clipped_pg_metric_names()


class GroupBaseline(NamedTuple):
    """The reward baseline and the rewards' standard deviation of each sample's group, both [B]."""

    baseline: Tensor
    std: Tensor


class TokenAdvantages(NamedTuple):
    """Advantages and returns of each token, [B, S] or [T]. `degenerate`: there were too few valid tokens to whiten the
    advantages, so all are 0."""

    advantages: Tensor
    returns: Tensor | None
    degenerate: bool


def group_ids_from_prompts(prompts: Tensor) -> Tensor:
    """Return, for each row of `prompts` [B, L] (or [B]), the index of the first equal row: int64 [B] on the CPU."""
    return C.group_ids_from_prompts(prompts)


def group_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid_mask: Tensor | None = None,
    leave_one_out: bool = True,
    std_rewards: Tensor | None = None,
) -> GroupBaseline:
    """Return the mean and the unbiased standard deviation of the valid rewards in each sample's group. With
    leave_one_out the sample's own reward is excluded from both.

    All arguments are [B]. `std_rewards` replaces the rewards in the standard deviation only. For a group with at most
    one valid sample, mean and deviation are (the sample's own reward, 0). The computation uses float64 and two passes,
    so equal rewards give exactly 0."""
    return GroupBaseline(*C.group_baseline(rewards, group_ids, valid_mask, leave_one_out, std_rewards))


def grpo_advantages(rewards: Tensor, baseline: Tensor, std: Tensor, *, normalize: bool) -> Tensor:
    """Return rewards - baseline, [B]; if `normalize`, divided by std + 1e-6 where std > 0. Raise ValueError if the
    arguments differ in shape."""
    if not rewards.shape == baseline.shape == std.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (rewards, baseline, std))
        raise ValueError(f"rewards, baseline and std have the shapes {shapes}: expected [B] for all")
    return C.grpo_advantages(rewards, baseline, std, normalize)


def gdpo_advantages(components: Tensor, weights: Tensor) -> Tensor:
    """Return the advantages of GDPO, [B]: the sum of K reward components, `components` [K, B], weighted by `weights`
    [K], whitened (minus its mean over the batch, divided by its unbiased standard deviation)."""
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
    """Return advantages[b] - kl_coef K[b, t], whitened over the valid tokens of the batch (biased variance, at least
    1e-8); 0 at masked positions. K is the estimate `kl_type` of the KL divergence from the reference.

    advantages: [B], float32 or float64. mask, logprobs, reference_logprobs: [B, S], or [T] with `offsets`."""
    values, degenerate = C.reinforce_plus_plus(
        floating(advantages), mask, logprobs, reference_logprobs, kl_coef, kl_type, offsets
    )
    return TokenAdvantages(values, None, degenerate)


def raw_reward(rewards: Tensor, mask: Tensor, *, normalize: bool, offsets: Tensor | None = None) -> TokenAdvantages:
    """Return advantages in which every token, also a masked one, has its sample's reward (`rewards` [B]). If
    `normalize`, they are whitened by the moments of the valid tokens. `offsets` is set for a ragged `mask` [T]: int64
    [B + 1], the index of each sample's first token, then T."""
    values, degenerate = C.raw_reward(floating(rewards), mask, normalize, offsets)
    return TokenAdvantages(values, None, degenerate)


@dataclass(frozen=True)
class GAEConfig:
    """The settings of `gae`.

    gae_lambda_value: lambda of the returns, which are then computed in a second pass; None: gae_lambda.
    length_adaptive_alpha: if above 0, replaces gae_lambda by clamp(1 - 1/max(alpha * length, 1), 0, 1) in each row.
    normalize: whiten the advantages over all valid tokens."""

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
    """Return generalized advantage estimates over the valid tokens of each row, from the last to the first.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lambda A_next,   returns_t = A_t + V_t

    "next" is the next valid token; after the last valid token V_next and A_next are 0. r_t is -kl_coef K_t, where K_t
    estimates the KL divergence from the reference; the row's last valid token also gets rewards[b]. rewards is [B];
    values, mask and log-probabilities are [B, S], or [T] with `offsets`. Advantages are 0 at masked positions."""
    decoupled = config.gae_lambda_value is not None
    lambda_value = config.gae_lambda_value if decoupled else config.gae_lambda
    return TokenAdvantages(
        *C.gae(
            rewards, floating(values), mask, logprobs, reference_logprobs, config.gamma, config.gae_lambda, lambda_value, decoupled,
            config.length_adaptive_alpha, config.kl_coef, config.kl_type, config.normalize, offsets,
        )
    )  # fmt: skip


def floating(t: Tensor) -> Tensor:
    """Return a tensor as float32, or unchanged if it is float32 or float64."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


@dataclass(frozen=True)
class ClippedPGConfig:
    """The settings of `clipped_pg_loss`. Each combines related flags of NeMo RL's `loss_fn`.

    ratio_mode: ppo (clipped ratio), reinforce (no ratio), on_policy (the ratio is 1, prev is curr), or another
        loss in csrc/kernels/clipped_pg_loss.h, by its name.
    fixed_length: without token_level_loss, divide a row's sum by this number instead of its token count; 0: off.
    importance_sampling: none, full, tis (clamped), icepop (zeroed outside the bounds), seq-mask-tis (zeroed by row).
    importance_level: token (one weight per token), or one weight per row: sequence (the product of its tokens' weights)
        or geometric (their geometric mean).

    ratio_clip_c, kl_input_clamp and kl_output_clamp are not applied if None. With kl_penalty 0 the reference's
    log-probabilities are not read. Contradictory settings raise ValueError at the first call of clipped_pg_loss."""

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
        out = C.ClippedPGConfig()
        # where Python has None, C++ has a number
        numbers = {"ratio_clip_c": 0.0, "kl_input_clamp": math.inf, "kl_output_clamp": math.inf}
        for field in fields(self):
            value = getattr(self, field.name)
            setattr(out, field.name, numbers[field.name] if value is None else value)
        out.dual_clip = self.ratio_clip_c is not None
        return out


@dataclass(frozen=True)
class ClippedPGInputs:
    """The inputs of the loss besides the current log-probabilities.

    [B, S], not shifted: advantages, token_mask, and the log-probabilities of generation, of the old policy (`prev`; not
    read with ratio_mode on_policy) and of the reference (read with a kl_penalty). [B]: sample_mask, and rewards (read
    with a positive_nll_weight). curr_logprobs_unfiltered [B, S-1], without top-k and top-p, replaces curr_logprobs in
    the KL term. kl_cov_penalty [B, S] weighs |curr - prev| with ratio_mode kl_cov."""

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
    """The counts over the global batch by which the loss is divided: valid tokens, valid sequences, and valid tokens of
    samples with a positive reward. With them, the losses of micro-batches add up to that of the global batch. A count
    of None is replaced by the micro-batch's own count."""

    valid_toks: Tensor | float | None = None
    valid_seqs: Tensor | float | None = None
    valid_positive_toks: Tensor | float | None = None

    def scalars(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _scalar(self.valid_toks), _scalar(self.valid_seqs), _scalar(self.valid_positive_toks)


class PolicyLossResult(NamedTuple):
    """The result of a policy's loss, such as `clipped_pg_loss`.

    loss: scalar tensor.
    grad_logprobs, grad_unfiltered: gradients with respect to the current log-probabilities, [B, S-1].
    metrics: name -> float.
    nonfinite: (sample, token) of the first term that is not finite; None if all are finite.
    mult_prob_error_sum: sum over valid tokens of the error whose mean is the metric `token_mult_prob_error`.
    grad_entropy: [B, S-1] gradient with respect to the entropies, if the loss has an entropy bonus.
    grad_candidates: [B, S-1, k] gradient with respect to the candidates' log-probabilities, with score centering."""

    loss: Tensor
    grad_logprobs: Tensor
    metrics: dict[str, float]
    grad_unfiltered: Tensor | None = None
    nonfinite: tuple[int, int] | None = None
    mult_prob_error_sum: float | None = None
    grad_entropy: Tensor | None = None
    grad_candidates: Tensor | None = None


def clipped_pg_loss(
    curr_logprobs: Tensor,
    inputs: ClippedPGInputs,
    counts: LossCounts = LossCounts(),
    config: ClippedPGConfig = ClippedPGConfig(),
) -> PolicyLossResult:
    """Return the clipped policy-gradient loss with its gradient and all metrics.

        loss = reduce(W C) + beta reduce(K) + mu NLL,   C = max(-A R, -A clamp(R)),   R = exp(curr - prev)

    A is the advantage, W the importance weight, K the KL estimate with beta = kl_penalty, and NLL the negative
    log-likelihood of samples with a positive reward, with mu = positive_nll_weight. This C is for ratio_mode ppo.
    `reduce` averages over valid tokens with token_level_loss, otherwise first over each row.

    curr_logprobs: [B, S-1], float32 or float64; column t is the log-probability of token t+1.

    Positions with token_mask or sample_mask 0 have no effect and get gradient 0. Raise ValueError for a missing input,
    a wrong shape or a contradictory config. A term that is not finite raises no error; `nonfinite` reports it."""
    loss, grad, grad_unfiltered, values = C.clipped_pg_loss(
        curr_logprobs, inputs.advantages, inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_policy_logprobs,
        inputs.token_mask, inputs.sample_mask, inputs.kl_cov_penalty, inputs.curr_logprobs_unfiltered, inputs.rewards, *counts.scalars(), config.native,
    )  # fmt: skip
    metrics, nonfinite = _named(_METRIC_NAMES, values)
    error_sum = metrics.pop("token_mult_prob_error_sum")
    if config.importance_sampling in ("none", "full"):  # these two truncate no weights
        del metrics["is_oob_ratio"]
    return PolicyLossResult(loss, grad, metrics, grad_unfiltered, nonfinite, error_sum)


def token_loss(
    inputs: ClippedPGInputs, counts: LossCounts, config: ClippedPGConfig = ClippedPGConfig()
) -> C.TokenLoss | None:
    """Return `clipped_pg_loss` as an object that the LM head evaluates while it holds a token's logits
    (`Trainer.forward_with_loss`). Return None if a token's gradient depends on other tokens, as in sequence-level
    losses and seq-mask-tis.

    `counts.valid_toks` and `counts.valid_seqs` must be given. If `inputs.prev_logprobs` is None, the current
    log-probabilities replace it."""
    if not C.TokenLoss.separable(config.native):
        return None
    return C.TokenLoss(
        inputs.advantages, inputs.prev_logprobs, inputs.generation_logprobs, inputs.reference_policy_logprobs, inputs.token_mask,
        inputs.sample_mask, inputs.kl_cov_penalty, inputs.rewards if counts.valid_positive_toks is not None else None, *counts.scalars(), config.native,
    )  # fmt: skip


def _named(names: list[str], values: Tensor) -> tuple[dict[str, float], tuple[int, int] | None]:
    """Return a loss's metrics {name: value}, and (sample, token) of its first term that is not finite, or None."""
    metrics = dict(zip(names, values.tolist(), strict=True))
    sample, token = int(metrics.pop("nonfinite_sample")), int(metrics.pop("nonfinite_token"))
    return metrics, None if sample < 0 else (sample, token)


def _scalar(value: Tensor | float | None) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(float(value), dtype=torch.float64)


_VALUE_METRIC_NAMES: list[str] = C.value_loss_metric_names()


class ValueLossResult(NamedTuple):
    """The result of `mse_value_loss`: the loss (scalar tensor), its gradient [B, S], metrics as floats, and the first
    (sample, token) whose loss is not finite, or None."""

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
    """Return the value loss scale/2 * sum(M e) / global_valid_toks, where e = (v - R)^2 and M masks valid tokens. With
    a cliprange, e is the maximum of (v - R)^2 and (clamp(v, old +- cliprange) - R)^2; raise ValueError without
    `old_values`.

    values, returns, old_values, token_mask: [B, S], not shifted. sample_mask: [B]. The metrics values_min and
    values_max are over valid tokens; 0 if there are none."""
    if cliprange and cliprange > 0 and old_values is None:
        raise ValueError("cliprange is set but the old values are missing: give `values` in the data")
    count, cliprange = _scalar(global_valid_toks), max(cliprange or 0.0, 0.0)
    loss, grad, numbers = C.mse_value_loss(
        values, returns, old_values, token_mask, sample_mask, count, scale, cliprange
    )
    return ValueLossResult(loss, grad, *_named(_VALUE_METRIC_NAMES, numbers))
