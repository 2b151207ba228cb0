"""What the sections `grpo` and `ppo` share: the training loop."""

from __future__ import annotations

from copy import copy
from typing import Any

from .asynchronous import AsyncConfig
from .base import Count, Int, NonNegative, Positive, Real, Section, Seed, key, section
from .rewards import RewardScalingConfig, RewardShapingConfig


def other_default(name: str, default: object) -> Any:
    """The key `name` of `LoopConfig` with another default; meaning and bounds stay."""
    info = copy(LoopConfig.model_fields[name])
    info.default = default
    return info


class LoopConfig(Section):
    """The training loop: how many prompts, how long, when to validate, which samples count."""

    num_prompts_per_step: Positive = key(32, "prompts in a step")
    num_generations_per_prompt: Positive = key(16, "responses to each prompt (G, one group)")
    max_rollout_turns: Positive = key(1, "turns of generation and environment (1 for math)")
    max_num_epochs: Positive = key(1, "passes over the data; training ends at this or at max_num_steps")
    max_num_steps: Count = key(1000000, "optimisation steps; training ends at this or at max_num_epochs")
    val_period: Int = key(10, "steps between validations; 0 or less: none")
    val_start_at: Int = key(-1, "no validation before this step")
    val_at_start: bool = key(False, "validate before the first step")
    val_at_end: bool = key(False, "validate after the last step")
    max_val_samples: Positive | None = key(256, "prompts a validation; null: all")
    val_batch_size: Positive | None = key(256, "validation prompts that are generated together")
    val_num_generations_per_prompt: Positive = key(1, "responses a validation prompt; above 1 adds the metric pass_k")
    stop_at_validation_metric: str | None = key(None, "stop training when this validation metric reaches the threshold")
    stop_at_validation_threshold: Real | None = key(None, "see stop_at_validation_metric")
    overlong_filtering: bool = key(False, "truncated samples get no gradient (they stay in the group's statistics)")
    use_dynamic_sampling: bool = key(False, "train only on groups whose rewards differ, drawing more prompts as needed")
    dynamic_sampling_max_gen_batches: Positive = key(
        10, "batches generated for one step before the run stops with an error (alias: max_num_gen_batches)"
    )
    batch_multiplier: Real = key(
        1.0,
        "prompts drawn at a time = num_prompts_per_step x this; needs dynamic sampling (alias: dapo_batch_multiplier)",
        ge=1,
    )
    dynamic_sampling_keep_surplus: bool = key(False, "keep surplus groups for the next step instead of dropping them")
    skip_reference_policy_logprobs_calculation: bool = key(False, "no reference model; needs a KL weight of 0")
    seed: Seed = key(42, "seed of data order and sampling")
    seq_logprob_error_threshold: NonNegative | None = key(
        None, "sequences whose mean multiplicative probability error is above this get no gradient"
    )
    reward_scaling: RewardScalingConfig = section(RewardScalingConfig, "map rewards to another range")
    reward_shaping: RewardShapingConfig = section(RewardShapingConfig, "penalties on length")

    @property
    def beside_training(self) -> AsyncConfig:
        """The section `async_grpo` or `async_ppo`."""
        return AsyncConfig()

    @property
    def trajectory_age(self) -> int:
        """A: how many versions of the weights a batch is old when it is trained; 0: rollouts are made in their own step."""
        return self.beside_training.max_trajectory_age_steps if self.beside_training.enabled else 0

    @property
    def policy_epochs(self) -> int:
        """Passes of the policy over each batch of rollouts."""
        return 1

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over each batch of rollouts."""
        return 0

    @property
    def first_policy_step(self) -> int:
        """Steps before this one (from 0) train the critic alone."""
        return 0

    @property
    def masked_rewards_are_out(self) -> bool:
        """Whether samples without a gradient have no say in their group's statistics."""
        return False

    @property
    def leave_one_out(self) -> bool:
        """Whether the baselines that are logged leave out the sample itself."""
        return True

    @property
    def prompts_per_round(self) -> int:
        """Prompts drawn at a time: num_prompts_per_step, times batch_multiplier with dynamic sampling."""
        factor = self.batch_multiplier if self.use_dynamic_sampling else 1
        return int(self.num_prompts_per_step * factor)
