"""Linear rescaling of rewards."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

import torch

from nemo_rl_cpp.algorithms._config import as_model
from nemo_rl_cpp.config.loop import RewardScalingConfig

BatchT = TypeVar("BatchT", bound=MutableMapping)


def scale_rewards(repeated_batch: BatchT, reward_scaling_cfg: RewardScalingConfig) -> BatchT:
    """Rescales `total_reward` and every `reward/<name>` of the batch in place and returns it.

    r -> target_min + (clamp(r) - source_min) / (source_max - source_min) * (target_max - target_min). Prints how many
    rewards were clamped. Equal source bounds give infinite or NaN rewards, as in NeMo RL; the configuration loader
    rejects them.
    """
    cfg = as_model(reward_scaling_cfg, RewardScalingConfig)
    if not cfg.enabled:
        return repeated_batch
    low, high = float(cfg.source_min), float(cfg.source_max)
    target_low, target_high = float(cfg.target_min), float(cfg.target_max)
    keys = ["total_reward", *(k for k in repeated_batch.keys() if str(k).startswith("reward/"))]
    for key in keys:
        rewards = torch.as_tensor(repeated_batch[key])
        outside = int(((rewards < low) | (rewards > high)).sum())
        if outside:
            print(
                f"[WARNING]: reward_scaling: {outside} of {rewards.numel()} values of {key} lie outside [{low}, {high}] and are clamped"
            )
        span = torch.tensor(high - low, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)
        repeated_batch[key] = target_low + (rewards.clamp(low, high) - low) / span * (target_high - target_low)
    return repeated_batch
