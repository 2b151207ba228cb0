"""The losses under NeMo RL's module path, and those that only its code uses."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, LossInputType, LossType, MetricNormalizer, MseValueLossFn
from nemo_rl_cpp.config.loss import ClippedPGLossConfig, MseValueLossConfig

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
]


class ClippedPGLossDataDict(TypedDict):
    """The keys the loss reads, [B, S] but for sample_mask [B]; prev_ and reference_policy_logprobs only if needed.

    Optional: rewards [B], curr_logprobs_unfiltered [B, S-1], global_valid_positive_toks (scalar).
    """

    input_ids: torch.Tensor
    advantages: torch.Tensor
    prev_logprobs: torch.Tensor
    generation_logprobs: torch.Tensor
    reference_policy_logprobs: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    __extra__: Any


class NLLLossFn:
    """Negative log-likelihood of the valid tokens over the global token count; `dpo_loss` gives one sum a sample."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(self, use_fused_linear_logprobs: bool = False):
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.metric_normalizations = {
            "loss": MetricNormalizer.TOKENS,
            "num_unmasked_tokens": MetricNormalizer.NONE,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """(loss, metrics) for log-probs [B, S-1]; the loss is [B] with `dpo_loss` (a mean if dpo_average_log_probs)."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        if dpo_loss:
            loss = -(next_token_logprobs * mask).sum(-1)
            if dpo_average_log_probs:
                loss = loss / mask.sum(-1).clamp(min=1)
        else:
            loss = -(next_token_logprobs * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {
            "loss": loss.item() if loss.ndim == 0 else loss,
            "num_unmasked_tokens": mask.sum().item(),
            "num_valid_samples": data["sample_mask"].sum().item(),
        }
