"""Dynamic sampling (DAPO): train only on prompts whose responses are neither all correct nor all wrong. Groups with
equal rewards have no advantages: they cost training time and yield no gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch

from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.files.plain_state import check_state
from nemo_rl_cpp.rollouts.batches import Rollouts, sample_mask


class DynamicSamplingExhausted(ValueError):
    """Raised if too few prompt groups have unequal rewards after the allowed number of batches."""


def group_numbers(ids: torch.Tensor) -> torch.Tensor:
    """Return int64 [B]: the group ids `ids` [B], renumbered 0, 1, ... in the order of first appearance."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids.tolist()], dtype=torch.long)


def extremes(
    groups: torch.Tensor, rewards: torch.Tensor, voters: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (smallest, largest) reward of each group, from `rewards` [B] and the rows' group numbers `groups` [B].
    Only rows with True in `voters`, bool [B], count (None: all); a group without such rows gets 0."""
    count = int(groups.max()) + 1 if len(groups) else 0
    empty = torch.zeros(count, dtype=rewards.dtype)
    values = rewards.cpu()
    if voters is not None:
        groups, values = groups[voters], values[voters]
    return (
        empty.scatter_reduce(0, groups, values, "amin", include_self=False),
        empty.scatter_reduce(0, groups, values, "amax", include_self=False),
    )


SamplerState = dict[str, object]  # the saved state of a `GroupSampler`: plain values, lists and tensors


@dataclass(eq=False)
class GroupSampler:
    """A buffer that gathers rollouts until a step has enough prompt groups. If dynamic sampling is disabled, it passes
    each batch on. Otherwise it keeps the groups whose raw rewards are not all equal, until it can return exactly
    `num_groups`."""

    num_groups: int  # prompts per training step
    enabled: bool = False
    max_gen_batches: int = 10  # the largest number of batches that a step may generate
    keep_surplus: bool = False  # keep groups beyond `num_groups` for the next step, instead of dropping them
    # rollouts -> the rows' weights in the loss, [B]; rows of weight 0 do not decide whether rewards are equal
    weights: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    group_size: int | None = None  # samples per group, which a checkpoint's groups must have; None: any size
    metrics: dict[str, float] = field(init=False, default_factory=dict)  # of the last step
    _cache: Rollouts | None = field(init=False, default=None)
    _checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._start_step()

    @classmethod
    def from_config(cls, loop: LoopConfig) -> Self:
        """Return a sampler for the configuration section of the training loop (such as `grpo` or `ppo`)."""
        weights = partial(sample_mask, overlong_filtering=loop.overlong_filtering)
        return cls(
            num_groups=loop.num_prompts_per_step,
            enabled=loop.use_dynamic_sampling,
            max_gen_batches=loop.dynamic_sampling_max_gen_batches,
            keep_surplus=loop.dynamic_sampling_keep_surplus,
            weights=weights if loop.masked_rewards_are_out else None,
            group_size=loop.num_generations_per_prompt,
        )

    def _start_step(self) -> None:
        self._batches = self._samples = 0
        self._reward_sum = 0.0
        # groups by their raw rewards: all equal and positive, all equal and not positive, or not all equal
        self._counts = {"all_right": 0, "all_wrong": 0, "mixed": 0}

    @property
    def full(self) -> bool:
        """Whether there are enough groups for a step."""
        return self.cached_groups >= self.num_groups if self.enabled else self._cache is not None

    @property
    def cached_groups(self) -> int:
        return 0 if self._cache is None else int(self._cache["group_id"].max()) + 1

    def add(self, rollouts: Rollouts) -> None:
        """Add a batch of rollouts. Raise ValueError for a reward that is not finite, and DynamicSamplingExhausted if
        this was the last allowed batch and there are fewer than `num_groups` groups."""
        # raw rewards, because shaping can make the equal rewards of a group differ
        rewards = rollouts["unshaped_total_reward" if "unshaped_total_reward" in rollouts else "total_reward"]
        bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"the reward of sample {bad[0]} is {rewards[bad[0]].item()}: rewards must be finite")
        rollouts = rollouts.copy()
        rollouts["group_id"] = groups = group_numbers(rollouts["group_id"])
        if self.enabled and self.keep_surplus and not self._checked:  # report in step 1 what a checkpoint cannot hold
            check_state(dict(rollouts.data), "rollouts")
            self._checked = True
        voters = None if self.weights is None else self.weights(rollouts) != 0
        lowest, highest = extremes(groups, rewards, voters)
        mixed = lowest != highest
        self._batches += 1
        self._samples += len(rewards)
        self._reward_sum += rollouts["total_reward"].double().sum().item()
        self._counts["mixed"] += int(mixed.sum())
        self._counts["all_right"] += int((~mixed & (highest > 0)).sum())
        self._counts["all_wrong"] += int((~mixed & (highest <= 0)).sum())
        if not self.enabled:
            self._keep(rollouts)
            return
        kept = rollouts.select_indices(mixed[groups])
        if kept.size:
            kept["group_id"] = group_numbers(kept["group_id"])
            self._keep(kept)
        if not self.full and self._batches >= self.max_gen_batches:
            counts = self._counts
            raise DynamicSamplingExhausted(
                f"dynamic sampling found {self.cached_groups} of the {self.num_groups} groups that a step needs in "
                f"{self._batches} generation batches (dynamic_sampling_max_gen_batches={self.max_gen_batches}): of "
                f"{sum(counts.values())} groups {counts['all_right']} were all right, {counts['all_wrong']} all wrong and "
                f"{counts['mixed']} mixed (all right: equal rewards above 0; all wrong: equal rewards of 0 or less). "
                "Use data that the model solves sometimes, generate more samples a prompt (num_generations_per_prompt), "
                "raise dynamic_sampling_max_gen_batches or batch_multiplier, or set use_dynamic_sampling=false"
            )

    def _keep(self, rollouts: Rollouts) -> None:
        rollouts["group_id"] = rollouts["group_id"] + self.cached_groups
        if self._cache is None:
            self._cache = rollouts
            return
        parts = [self._cache, rollouts]
        for key in {key for part in parts for key in part.keys() if key == "mask_sample" or key.startswith("reward/")}:
            like = next(part[key] for part in parts if key in part)
            for part in parts:  # environments may return these columns only in some rounds
                if key not in part:
                    part[key] = like.new_zeros(part.size)
        self._cache = Rollouts.from_batches(parts)

    def take(self) -> Rollouts:
        """Return the rollouts to train on, with `group_id` numbered from 0, and set `metrics`. `full` must be True."""
        batch, self._cache = self._cache, None
        if self.enabled:
            mine = batch["group_id"] < self.num_groups
            batch, rest = batch.select_indices(mine), batch.select_indices(~mine)
            if rest.size and self.keep_surplus:
                rest["group_id"] = rest["group_id"] - self.num_groups
                self._cache = rest
            self.metrics = self._step_metrics(batch, rest.size)
        self._start_step()
        return batch

    def _step_metrics(self, batch: Rollouts, surplus: int) -> dict[str, float]:
        return {
            "dynamic_sampling_num_gen_batches": self._batches,
            "dynamic_sampling_num_discarded_valid_samples": 0 if self.keep_surplus else surplus,
            "dynamic_sampling_num_kept_surplus_samples": surplus if self.keep_surplus else 0,
            "dynamic_sampling_kept_groups": self.num_groups,
            "dynamic_sampling_discarded_groups": self._counts["all_right"] + self._counts["all_wrong"],
            "dynamic_sampling_all_right_groups": self._counts["all_right"],
            "dynamic_sampling_all_wrong_groups": self._counts["all_wrong"],
            "dynamic_sampling_mixed_groups": self._counts["mixed"],
            "reward": self._reward_sum / self._samples if self._samples else batch["total_reward"].mean().item(),
            "filtered_reward": batch["total_reward"].double().mean().item(),
        }

    def state_dict(self) -> SamplerState:
        return {
            "cache": None if self._cache is None else dict(self._cache.data),
            "batches": self._batches,
            "counts": dict(self._counts),
            "reward_sum": self._reward_sum,
            "samples": self._samples,
        }

    def takes(self, cache: Mapping[str, torch.Tensor]) -> bool:
        """Return whether this sampler can use `cache`, the groups of a checkpoint: it must keep surplus groups, and
        each group must have `group_size` samples."""
        sizes = torch.bincount(cache["group_id"]).unique().tolist()
        return self.enabled and self.keep_surplus and (self.group_size is None or sizes == [self.group_size])

    def load_state_dict(self, state: SamplerState) -> None:
        self._cache = None if state["cache"] is None else Rollouts(state["cache"])
        self._batches = state["batches"]
        self._counts = dict(state["counts"])
        self._reward_sum = state["reward_sum"]
        self._samples = state["samples"]
