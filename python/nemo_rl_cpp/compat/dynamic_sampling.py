"""Dynamic sampling with NeMo RL's signature, as its DAPO guide shows it."""

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
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.metrics.timer import Timer


def mixed_rows(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return bool [B]: whether the raw rewards of a row's group differ."""
    groups, rewards = group_numbers(batch), raw_rewards(batch)
    lowest, highest = extremes(groups, rewards)
    return (lowest != highest)[groups]


class SamplingRound(NamedTuple):
    """The result of one round of dynamic sampling: the batch, whether it has enough rows for a step, the rows kept for
    the next round (`cache`), and metrics."""

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
    """Do one round of dynamic sampling, with NeMo RL's signature and results. The training loop uses `GroupSampler`
    instead.

    Args:
        repeated_batch: the rollouts of this round; `baseline` and `std` are added to it.
        std, baseline: the values of each row's group, [B].
        dynamic_sampling_num_gen_batches: number of batches generated for this step, including this one.
        master_config: a configuration (or dictionary) with section `grpo` or `ppo`.
        batch_cache: the rows kept in earlier rounds.
        unit: "group" keeps groups whose raw rewards differ, and raises once the configured number of batches has been
            generated. "sample" is NeMo RL's rule: it keeps rows with std != 0, and allows one more batch. It is also
            used for a batch with neither `group_id` nor `idx`, whose groups are unknown.

    Return (batch, is_complete, cache, metrics). With dynamic sampling off these are (repeated_batch, True, None, {}).
    Otherwise `filtered_reward` of the batch has the rewards of the kept rows, and `total_reward` those of all rows of
    all rounds. So `total_reward` is longer than the other entries until the batch is complete and truncated to the
    configured size.

    Raise DynamicSamplingExhausted (a ValueError) if the allowed number of batches is used up."""
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
