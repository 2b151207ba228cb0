"""Native advantage estimators. Formulas: csrc/kernels/{group_baseline,reinforce_plus_plus,gae,masked_reduce}.h.

Masks may have any dtype and hold 0 and 1. Nothing at a masked position is read into a valid token's advantage.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C


class GroupBaseline(NamedTuple):
    """Baseline and standard deviation of each sample's group, both [B]."""

    baseline: Tensor
    std: Tensor


class TokenAdvantages(NamedTuple):
    """Advantages and returns [B, S]; `degenerate`: too few valid tokens to whiten, the advantages are 0."""

    advantages: Tensor
    returns: Tensor | None
    degenerate: bool


def group_ids_from_prompts(prompts: Tensor) -> Tensor:
    """[B] int64 on the CPU: for each row of `prompts` [B, L] (or [B]) the index of the first equal row."""
    return C.group_ids_from_prompts(prompts)


def group_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid_mask: Tensor | None = None,
    leave_one_out: bool = True,
    std_rewards: Tensor | None = None,
) -> GroupBaseline:
    """Mean and unbiased std of the valid rewards in each sample's group, the sample itself left out if leave_one_out.

    All arguments [B]. `std_rewards` replaces the rewards in the std alone. A group with at most one valid sample gives
    (own reward, 0). Computed in float64 in two passes: equal rewards give std exactly 0.
    """
    return GroupBaseline(*C.group_baseline(rewards, group_ids, valid_mask, leave_one_out, std_rewards))


def grpo_advantages(rewards: Tensor, baseline: Tensor, std: Tensor, *, normalize: bool) -> Tensor:
    """[B]: reward - baseline, over (std + 1e-6) where `normalize` and std > 0."""
    return C.grpo_advantages(rewards, baseline, std, normalize)


def gdpo_advantages(components: Tensor, weights: Tensor) -> Tensor:
    """[B] from component advantages [K, B] and weights [K]: their weighted sum, centred and over its unbiased std."""
    return C.gdpo_advantages(components, weights)


def reinforce_plus_plus(
    advantages: Tensor,
    mask: Tensor,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
) -> TokenAdvantages:
    """(advantage[b] - kl_coef K[b, t]) whitened over the valid tokens of the batch (biased variance, at least 1e-8);
    0 at masked positions. advantages [B] float32 or float64, mask and log-probs [B, S].
    """
    values, degenerate = C.reinforce_plus_plus(_real(advantages), mask, logprobs, reference_logprobs, kl_coef, kl_type)
    return TokenAdvantages(values, None, degenerate)


def raw_reward(rewards: Tensor, mask: Tensor, *, normalize: bool) -> TokenAdvantages:
    """The reward [B] on every token [B, S], whitened over the valid ones if `normalize`."""
    values, degenerate = C.raw_reward(_real(rewards), mask, normalize)
    return TokenAdvantages(values, None, degenerate)


@dataclass(frozen=True)
class GAEConfig:
    """The settings of `gae`. With gae_lambda_value the returns come from a pass of their own with that lambda.
    length_adaptive_alpha > 0 replaces gae_lambda by clamp(1 - 1/max(alpha * length, 1), 0, 1) a row. `normalize` whitens
    the advantages over all valid tokens."""

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
) -> TokenAdvantages:
    """Generalized advantage estimation over the valid tokens of each row, last to first.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lambda A_next,   returns_t = A_t + V_t

    "next" is the next valid token (0 after the last); r_t is -kl_coef K_t, plus rewards[b] at the row's last valid
    token. rewards [B]; values, mask, log-probs [B, S]. Advantages are 0 at masked positions.
    """
    decoupled = config.gae_lambda_value is not None
    lambda_value = config.gae_lambda_value if decoupled else config.gae_lambda
    return TokenAdvantages(
        *C.gae(
            rewards, _real(values), mask, logprobs, reference_logprobs, config.gamma, config.gae_lambda, lambda_value, decoupled,
            config.length_adaptive_alpha, config.kl_coef, config.kl_type, config.normalize,
        )
    )  # fmt: skip


def _real(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()
