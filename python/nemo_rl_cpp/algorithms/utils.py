"""Small functions that the algorithms share."""

import random
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_rl_cpp import ops

T = TypeVar("T")


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


def setting(config: object, name: str, *default: T) -> T:
    """One field of a mapping or an object; without a default a missing one is a ValueError that names it."""
    found = config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
    if found is not _MISSING:
        return found
    if default:
        return default[0]
    raise ValueError(f"the configuration has no '{name}'; add the key (known: {sorted(_names(config))})")


def _names(config: object) -> list[str]:
    return list(config) if isinstance(config, Mapping) else [n for n in vars(config) if not n.startswith("_")]


_MISSING = object()
