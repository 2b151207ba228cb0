"""The `grpo` section."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from .base import Count, Int, NonNegative, Positive, Real, Section, Seed, key, no_effect, only, section
from .length_penalty import LengthPenaltyConfig
from .rewards import RewardScalingConfig, RewardShapingConfig


class AdvEstimatorConfig(Section):
    """How rewards become advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus"] = key(
        "grpo",
        "grpo: against the group's mean; gdpo: that for each part of the reward, their weighted sum whitened; "
        "reinforce_plus_plus: whitened over the batch's tokens",
    )
    normalize_rewards: bool = key(True, "grpo, gdpo: divide by the group's standard deviation")
    use_leave_one_out_baseline: bool = key(
        True, "grpo, gdpo: a sample's baseline is the mean of the others of its group"
    )
    reward_weights: list[Real] | None = key(
        None, "gdpo: one factor a part of the reward, in the order of the parts' names; null: 1 each"
    )
    minus_baseline: bool = key(True, "reinforce_plus_plus: subtract the group's mean first")


class AsyncGRPOConfig(Section):
    """Asynchronous training of NeMo RL, which is not supported."""

    enabled: bool = only(False, why="training while generating is not supported")
    max_trajectory_age_steps: Int = no_effect(1)
    max_generation_failures: Int = no_effect(0)
    in_flight_weight_updates: bool = no_effect(False)
    recompute_kv_cache_after_weight_updates: bool = no_effect(False)


class GRPOConfig(Section):
    """The training loop: how many prompts, how long, when to validate, which samples count."""

    num_prompts_per_step: Positive = key(32, "prompts a step")
    num_generations_per_prompt: Positive = key(16, "responses to each prompt (G, one group)")
    max_rollout_turns: Positive = key(1, "turns of generation and environment (1 for math)")
    max_num_epochs: Positive = key(1, "passes over the data; training ends at this or at max_num_steps")
    max_num_steps: Count = key(1000000, "optimisation steps; training ends at this or at max_num_epochs")
    normalize_rewards: bool = key(True, "read by adv_estimator through ${grpo.normalize_rewards}")
    use_leave_one_out_baseline: bool = key(
        True, "baseline and deviation for logging; read by adv_estimator through ${grpo.use_leave_one_out_baseline}"
    )
    advantage_clip_low: Real | None = key(None, "lower bound of final advantages")
    advantage_clip_high: Real | None = key(None, "upper bound of final advantages")
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
    masked_reward_policy: Literal["include", "exclude"] = key(
        "include",
        "whether samples without a gradient (overlong_filtering, masked by the environment, prompts too long) vote in their group's "
        "baseline and deviation, and in whether dynamic sampling keeps it",
    )
    length_penalty: LengthPenaltyConfig | None = key(
        None, "bonuses and penalties on length within each group, before reward_scaling and reward_shaping; null: none"
    )
    seed: Seed = key(42, "seed of data order and sampling")
    seq_logprob_error_threshold: NonNegative | None = key(
        None, "sequences whose mean multiplicative probability error is above this get no gradient"
    )
    reward_scaling: RewardScalingConfig = section(RewardScalingConfig, "map rewards to another range")
    reward_shaping: RewardShapingConfig = section(RewardShapingConfig, "penalties on length")
    adv_estimator: AdvEstimatorConfig = section(AdvEstimatorConfig, "how rewards become advantages")
    async_grpo: AsyncGRPOConfig | None = section(AsyncGRPOConfig, "asynchronous training (not supported)")
    calculate_advantages_on_gpu: bool = no_effect(False, "advantages are computed in C++")
    invalid_tool_call_advantage: Real | None = only(None, why="NeMo Gym's tool calls are not supported")
    malformed_thinking_advantage: Real | None = only(None, why="NeMo Gym's thinking checks are not supported")
    deduplicate_multimodal_data: bool = only(False, why="images and sound are not supported")
    debug_payload_metrics: bool = only(False, why="sizes of Ray messages are not measured")


class RewardPenaltyConfig(Section):
    """Penalties of NeMo Gym, which are not supported."""

    penalize_duplicated_reasoning: bool = only(False, why="NeMo Gym's reward penalties are not supported")
    penalize_empty_final_answer: bool = only(False, why="NeMo Gym's reward penalties are not supported")
    penalize_unwanted_tokens: bool = only(False, why="NeMo Gym's reward penalties are not supported")
    penalize_malformed_think_tag: bool = only(False, why="NeMo Gym's reward penalties are not supported")
    token_ids: list[Int] | dict | None = no_effect(None)


class DataPlaneConfig(Section):
    """Transfer queues between Ray workers; data stays in one process here."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = no_effect(False, "data stays in one process")
    impl: str = no_effect("transfer_queue")
    backend: str = no_effect("simple")
    storage_capacity: Int = no_effect(1000000)
    num_storage_units: Int = no_effect(2)
    claim_meta_poll_interval_s: Real = no_effect(0.5)
    global_segment_size: Int = no_effect(549755813888)
    local_buffer_size: Int = no_effect(68719476736)
