"""Dynamic sampling with NeMo RL's signature, as its DAPO guide prints it."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch

from nemo_rl_cpp.algorithms.dynamic_sampling import (
    ADVICE,
    DynamicSamplingExhausted,
    extremes,
    group_numbers,
    raw_rewards,
)
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.metrics.timer import Timer


def mixed_rows(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """bool [B]: rows whose group has different raw rewards (max != min, exactly)."""
    groups, rewards = group_numbers(batch), raw_rewards(batch)
    lowest, highest = extremes(groups, rewards)
    return (lowest != highest)[groups]


class SamplingRound(NamedTuple):
    """What `dynamic_sampling` returns: the batch, whether it is complete, and what earlier rounds kept for the next one."""

    batch: BatchedDataDict[DatumSpec]
    is_complete: bool
    cache: BatchedDataDict[DatumSpec] | None
    metrics: dict[str, float]


def dynamic_sampling(
    repeated_batch: BatchedDataDict[DatumSpec],
    std: torch.Tensor,
    baseline: torch.Tensor,
    dynamic_sampling_num_gen_batches: int,
    master_config: TrainMasterConfig | Mapping[str, Mapping[str, int]],
    timer: Timer | None,
    batch_cache: BatchedDataDict[DatumSpec] | None = None,
    unit: Literal["group", "sample"] = "group",
) -> SamplingRound:
    """Do one round of dynamic sampling, with NeMo RL's signature and results. The loop here uses `GroupSampler`.

    Args:
        repeated_batch: rollouts of this round; gets `baseline` and `std`.
        std, baseline: [B] of each row's group.
        dynamic_sampling_num_gen_batches: batches generated for this step, this one included.
        master_config: a configuration (or dictionary) with section `grpo` or `ppo`.
        batch_cache: what earlier rounds kept.
        unit: "group" keeps groups whose raw rewards differ, and raises once the configured number of batches was
            generated; "sample" is NeMo RL's rule: rows with std != 0, and one batch more. A batch with neither
            `group_id` nor `idx` says nothing of groups but their std, and goes by "sample".

    With dynamic sampling off: the batch, True, None, {}. Else the batch's `filtered_reward` are the kept rows' rewards and its `total_reward` the rewards of
    all rows of all rounds, and so longer than the other entries until the batch is complete and cut.

    Raises DynamicSamplingExhausted (a ValueError) when the batches allowed are used up.
    """
    if unit not in ("group", "sample"):
        raise ValueError(f"unit is {unit!r}; it must be 'group' or 'sample'")
    if "group_id" not in repeated_batch and "idx" not in repeated_batch:
        unit = "sample"
    found = ((name, master_config.get(name)) for name in ("grpo", "ppo"))
    section_name, section = next((each for each in found if each[1] is not None), ("", None))
    if section is None:
        raise ValueError("the configuration has neither a grpo nor a ppo section")
    repeated_batch["baseline"], repeated_batch["std"] = baseline, std
    if not section["use_dynamic_sampling"]:
        return SamplingRound(repeated_batch, True, None, {})
    with timer.time("dynamic_sampling") if timer is not None else nullcontext():
        kept = mixed_rows(repeated_batch) if unit == "group" else std != 0.0
        batch = repeated_batch.select_indices(kept)
        batch["filtered_reward"] = batch["total_reward"]
        batch["total_reward"] = repeated_batch["total_reward"]
        if bool(kept.any()):
            batch_cache = batch if batch_cache is None else BatchedDataDict.from_batches([batch_cache, batch])
            batch = batch_cache
        wanted = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
        available = len(batch["filtered_reward"])
        if available < wanted:
            limit = section["dynamic_sampling_max_gen_batches"]
            if limit <= 0:
                raise ValueError(f"{section_name}.dynamic_sampling_max_gen_batches is {limit}; it must be positive")
            used = dynamic_sampling_num_gen_batches
            if used > limit or (used == limit and unit == "group"):
                raise DynamicSamplingExhausted(
                    f"dynamic sampling has {available} of {wanted} samples after {used} generation batches "
                    f"({section_name}.dynamic_sampling_max_gen_batches={limit}). {ADVICE}"
                )
            return SamplingRound(batch, False, batch_cache, {})
        metrics = {"dynamic_sampling_num_discarded_valid_samples": available - wanted}
        return SamplingRound(batch.slice(0, wanted), True, batch_cache, metrics)
