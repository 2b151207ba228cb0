"""The `ppo` section."""

from __future__ import annotations

from typing import Literal

from .base import Count, Fraction, Int, NonNegative, Positive, Real, Section, Seed, key, no_effect, only, section
from .rewards import RewardScalingConfig, RewardShapingConfig


class GAEConfig(Section):
    """Generalised advantage estimation, or raw rewards as advantages."""

    name: Literal["gae", "raw_reward"] = key(
        "gae", "gae: with a value model; raw_reward: without, the reward is the advantage"
    )
    gae_lambda: Fraction = key(0.95, "lambda: 0 is one-step TD, 1 is Monte Carlo")
    gae_gamma: Fraction = key(1.0, "discount a token")
    normalize_advantages: bool = key(True, "whiten advantages over the batch's valid tokens")
    gae_lambda_value: Fraction | None = key(None, "VAPO: lambda of the returns; null: gae_lambda")
    gae_lambda_policy: Fraction | None = key(None, "VAPO: lambda of the advantages; null: gae_lambda")
    length_adaptive_alpha: NonNegative = key(0.0, "VAPO: policy lambda = 1 - 1/(alpha x response length); 0: off")


class AsyncPPOConfig(Section):
    """Asynchronous training of NeMo RL, which is not supported."""

    enabled: bool = only(False, why="training while generating is not supported")
    max_trajectory_age_steps: Int = no_effect(1)
    warmup_generation_lead_steps: Int | None = no_effect(None)
    in_flight_weight_updates: bool = no_effect(False)
    recompute_kv_cache_after_weight_updates: bool = no_effect(False)
    drop_incomplete_targets_on_restore: bool = no_effect(False)

    @property
    def resolved_warmup_generation_lead_steps(self) -> int:
        """NeMo RL's: `max_trajectory_age_steps` where the lead is left out."""
        lead = self.warmup_generation_lead_steps
        return self.max_trajectory_age_steps if lead is None else lead

    def validate_settings(self) -> AsyncPPOConfig:
        """NeMo RL's check. Here the schema has done it: `enabled` can only be false."""
        return self


class PPOConfig(Section):
    """The training loop of PPO; keys that GRPO has too mean the same."""

    num_prompts_per_step: Positive = key(32, "prompts a step")
    num_generations_per_prompt: Positive = key(16, "responses to each prompt")
    max_rollout_turns: Positive = key(1, "turns of generation and environment (1 for math)")
    max_num_epochs: Positive = key(100000, "passes over the data; training ends at this or at max_num_steps")
    max_num_steps: Count = key(100000, "steps; training ends at this or at max_num_epochs")
    ppo_epochs: Positive = key(
        4, "passes of the actor, and of the critic unless critic_ppo_epochs says otherwise, over each rollout batch"
    )
    critic_ppo_epochs: Positive | None = key(None, "passes of the critic over each rollout batch; null: ppo_epochs")
    policy_training_start_step: Count = key(0, "until this step only the critic is trained")
    warm_start_value_checkpoint: str | None = key(
        None,
        "folder step_N of a run whose critic's weights a fresh run begins with; its optimizer and schedule begin anew; null: none",
    )
    val_period: Int = key(20, "steps between validations; 0 or less: none")
    val_at_start: bool = key(True, "validate before the first step")
    val_at_end: bool = key(False, "validate after the last step")
    max_val_samples: Positive | None = key(256, "prompts a validation; null: all")
    val_batch_size: Positive | None = key(256, "validation prompts that are generated together")
    overlong_filtering: bool = key(False, "truncated samples get no gradient")
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
    skip_reference_policy_logprobs_calculation: bool = key(True, "no reference model; needs a KL weight of 0")
    seed: Seed = key(42, "seed of data order and sampling")
    seq_logprob_error_threshold: NonNegative | None = key(
        None, "sequences whose mean multiplicative probability error is above this get no gradient"
    )
    adv_estimator: GAEConfig = section(GAEConfig, "how rewards become advantages")
    reward_scaling: RewardScalingConfig = section(RewardScalingConfig, "map rewards to another range")
    reward_shaping: RewardShapingConfig = section(RewardShapingConfig, "penalties on length")
    async_ppo: AsyncPPOConfig = section(AsyncPPOConfig, "asynchronous training (not supported)")

    def validate_async_warmup_settings(self) -> PPOConfig:
        """NeMo RL's check of asynchronous training, which the schema has done."""
        return self
