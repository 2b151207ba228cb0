"""How far the trainer's log-probs of whole sequences are from the generator's, and masking the worst."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor


def compute_and_apply_seq_logprob_error_masking(
    train_data: MutableMapping[str, Tensor], rewards: Tensor, seq_logprob_error_threshold: float | None
) -> dict[str, float]:
    """Metrics of e_b = sum_t exp(|generation - prev| M) M / max(sum_t M, 1) over the shifted tokens of each sequence;
    with a threshold, sample_mask becomes 0 (in place) where e_b exceeds it.

    Returns max_, mean_ and min_seq_mult_prob_error over valid sequences, those with a trained token (0 if none), the same
    with `_after_mask` over those still valid, num_masked_seqs, and masked_correct_pct: the share of the masked ones with
    reward 1.
    """
    sample_mask: Tensor = train_data["sample_mask"]
    token_mask = train_data["token_mask"][:, 1:]
    mask = token_mask * sample_mask.unsqueeze(-1)
    gap = (train_data["generation_logprobs"][:, 1:] - train_data["prev_logprobs"][:, 1:]).abs()
    gap = torch.where(mask != 0, gap, torch.zeros_like(gap))
    error = (torch.exp(gap * mask) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    measured = mask.sum(-1) != 0  # a sequence without a trained token has no error
    metrics = _extrema(error, measured, "")
    masked, correct = 0, 0.0
    if seq_logprob_error_threshold is not None:
        drop = (error > seq_logprob_error_threshold) & measured
        masked = int(drop.sum())
        if masked:
            correct = float((torch.as_tensor(rewards, device=drop.device).reshape(-1)[drop] == 1).float().mean())
            sample_mask = torch.where(drop, torch.zeros_like(sample_mask), sample_mask)
            train_data["sample_mask"] = sample_mask
    metrics |= _extrema(error, measured & (sample_mask != 0), "_after_mask")
    return metrics | {"num_masked_seqs": masked, "masked_correct_pct": correct}


def _extrema(error: Tensor, valid: Tensor, suffix: str) -> dict[str, float]:
    values = error[valid]
    if not values.numel():
        values = error.new_zeros(1)
    return {
        f"max_seq_mult_prob_error{suffix}": values.max().item(),
        f"mean_seq_mult_prob_error{suffix}": values.mean().item(),
        f"min_seq_mult_prob_error{suffix}": values.min().item(),
    }
