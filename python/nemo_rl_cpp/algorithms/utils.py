"""Small functions that the algorithms share."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nemo_rl_cpp import ops


def get_gdpo_reward_component_keys(batch: Mapping[str, object]) -> list[str]:
    """The keys `reward/<name>` of a batch, sorted."""
    return sorted(key for key in batch.keys() if str(key).startswith("reward/"))


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(baseline, std), both [B]: mean and unbiased std of the rewards of the samples with the same prompt.

    prompts [B, L] (rows equal as a whole, they need not be adjacent), rewards and valid_mask [B]; samples with
    valid_mask 0 do not count. With leave_one_out_baseline the sample itself is left out. `std_rewards` replaces the
    rewards in the std. A prompt with at most one valid sample gives (own reward, 0).
    """
    result = ops.group_baseline(
        rewards,
        ops.group_ids_from_prompts(prompts),
        valid_mask=valid_mask,
        leave_one_out=leave_one_out_baseline,
        std_rewards=std_rewards,
    )
    return result.baseline, result.std


def set_seed(seed: int) -> None:
    """Seeds Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
