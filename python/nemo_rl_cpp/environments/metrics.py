"""Metrics over a batch of rollouts."""

import torch


def calculate_pass_rate_per_prompt(prompts: torch.Tensor, is_correct: torch.Tensor) -> float:
    """Share of the distinct prompts [B, S] that have at least one correct sample (is_correct [B] > 0)."""
    unique, group = torch.unique(prompts, dim=0, return_inverse=True)
    passed = torch.zeros(len(unique)).index_add_(0, group.flatten(), (is_correct > 0).float())
    return (passed > 0).float().mean().item()
