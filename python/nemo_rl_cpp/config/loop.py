"""The sections `grpo` and `ppo`: training loops and advantage estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict

from .base import Count, Entry, Fraction, Int, NonNegative, OneOf, Positive, Real, Section, Seed, Table, key, section
from .errors import Report
from .penalties import LengthPenaltyConfig


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """The definition of an advantage estimator: its class, and the algorithms that may use it ("grpo", "ppo")."""

    algorithms: tuple[str, ...]


def _estimator(name: str, *algorithms: str) -> EstimatorEntry:
    return EstimatorEntry(f"nemo_rl_cpp.algorithms.advantage_estimator:{name}", algorithms)


ADVANTAGE_ESTIMATORS: Table[EstimatorEntry] = Table(
    "advantage estimator",
    {
        "grpo": _estimator("GRPOAdvantageEstimator", "grpo"),
        "gdpo": _estimator("GDPOAdvantageEstimator", "grpo"),
        "reinforce_plus_plus": _estimator("ReinforcePlusPlusAdvantageEstimator", "grpo"),
        "gae": _estimator("GeneralizedAdvantageEstimator", "ppo"),
        "raw_reward": _estimator("RawRewardAdvantageEstimator", "ppo"),
        "opo": _estimator("OPOAdvantageEstimator", "grpo"),
        "grpo_passk": _estimator("BestOfGroupAdvantageEstimator", "grpo"),
        "pass_at_k": _estimator("PassAtKAdvantageEstimator", "grpo"),
        "max_rl": _estimator("MaxRLAdvantageEstimator", "grpo"),
        "remax": _estimator("ReMaxAdvantageEstimator", "grpo"),
        "optimal_token_baseline": _estimator("OptimalTokenBaselineAdvantageEstimator", "grpo"),
        "opd": _estimator("OPDAdvantageEstimator", "grpo", "ppo"),
    },
)
"""The table of advantage estimators: name -> class."""


def estimators_of(algorithm: str) -> list[str]:
    """Return the names of the advantage estimators that `algorithm` ("grpo" or "ppo") may use."""
    return [name for name, entry in ADVANTAGE_ESTIMATORS.data.items() if algorithm in entry.algorithms]


GRPOEstimator = Annotated[str, OneOf(lambda: estimators_of("grpo"), dotted=True)]
PPOEstimator = Annotated[str, OneOf(lambda: estimators_of("ppo"), dotted=True)]


class RewardScalingConfig(Section):
    """Settings of a linear map of rewards from [source_min, source_max] to [target_min, target_max]. Rewards outside
    the source range are first clamped to it."""

    is_switched = True
    spellings = {"correct": "target_max", "incorrect": "target_min"}
    enabled: bool = key(False, "Scale the rewards.")
    source_min: Real = key(0.0, "Reward that is mapped to target_min. Lower rewards are clamped to it first.")
    source_max: Real = key(1.0, "Reward that is mapped to target_max. Higher rewards are clamped to it first.")
    target_min: Real = key(0.0, "Scaled value of source_min. Alias: incorrect.")
    target_max: Real = key(1.0, "Scaled value of source_max. Alias: correct.")


class RewardShapingConfig(Section):
    """Settings of length penalties: DAPO's overlong penalty, or ProRLv2's stop-properly penalty, or both if `compose`
    is true."""

    is_switched = True
    enabled: bool = key(False, "Apply length penalties to the rewards.")
    overlong_buffer_length: Count | None = None
    """DAPO's overlong penalty: number of tokens before max_response_length over which the penalty grows linearly from
    0. At most max_response_length."""
    overlong_buffer_penalty: NonNegative | None = None
    """DAPO's overlong penalty: amount subtracted from the reward at max_response_length. The penalty of longer
    responses keeps growing at the same slope."""
    max_response_length: Positive | None = None
    """DAPO's overlong penalty: response length in tokens at which the full penalty applies."""
    stop_properly_penalty_coef: Fraction | None = None
    """ProRLv2's stop-properly penalty: factor from 0 to 1 of a truncated response's reward. null: off."""
    compose: bool = False
    """true: apply the stop-properly, then the overlong penalty. false: the latter only without the former."""

    @property
    def applies_overlong_penalty(self) -> bool:
        return self.enabled and (self.compose or self.stop_properly_penalty_coef is None)

    def check_all(self, report: Report) -> None:
        super().check_all(report)
        self.check_together("", report)

    def check_together(self, prefix: str, report: Report) -> None:
        if not self.applies_overlong_penalty:
            return
        buffer, longest = "overlong_buffer_length", "max_response_length"
        overlong = (buffer, "overlong_buffer_penalty", longest)
        missing = [name for name in overlong if getattr(self, name) is None]
        if self.compose and self.stop_properly_penalty_coef is None:
            report.add(f"{prefix}compose", "needs stop_properly_penalty_coef and the overlong keys")
        if missing:
            text = f"is missing: the overlong penalty needs {', '.join(overlong)} (or set stop_properly_penalty_coef)"
            report.add(f"{prefix}{missing[0]}", text, f"{prefix}enabled")
        elif not 1 <= self.overlong_buffer_length <= self.max_response_length:
            text = f"must lie between 1 and {longest} {self.max_response_length}, not {self.overlong_buffer_length}"
            report.add(f"{prefix}{buffer}", f"{text}: the penalty grows over its last tokens", f"{prefix}{longest}")


class AsyncConfig(Section):
    """Settings of rollouts of later steps that overlap with the training of the current step. They need engines with
    separate weights (policy.generation.colocated.enabled=false), and importance sampling correction in the loss."""

    enabled: bool = key(False, "Generate the rollouts of later steps while the current step trains.")
    max_trajectory_age_steps: Positive = 1
    """How many steps ahead rollouts are generated: with A, step k trains on a batch of the weights of step k - A."""
    in_flight_weight_updates: bool = False
    """Update the engines' weights once in the middle of the responses. The later tokens of a long response then come
    from weights that are one step newer. Rollouts of agents (NeMo Gym, verifiers, env.agent) have no common pause: one
    version of the weights generates a whole batch, and the run prints a note."""
    in_flight_after_tokens: Positive | None = key(None, ge=2)
    """With in_flight_weight_updates: each response pauses after this many tokens, until the step that trains meanwhile
    has finished. null: half of policy.generation.max_new_tokens."""
    recompute_kv_cache_after_weight_updates: bool = False
    """With in_flight_weight_updates: recompute the KV cache of a paused response with the new weights, so that the
    log-probabilities of its later tokens are exactly those of the new weights. false: keep the KV cache of the old
    weights."""

    failures_allowed: ClassVar[int] = 0
    """The number of rounds of generation and scoring that may fail during a run."""


class OnePassLoop(Section):
    """The base class of training loops' sections, with the keys that all share. Its attributes describe a loop with one
    pass over each batch and no overlap of generation and training; subclasses override those that differ."""

    max_num_epochs: Positive = 1
    """Number of passes over the data. Training ends after max_num_epochs or max_num_steps, whichever comes first."""
    max_num_steps: Positive = 1000000
    """Number of training steps. Training ends after max_num_epochs or max_num_steps, whichever comes first."""
    val_period: Int = key(10, "Number of steps between validations. 0 or less: no validation at intervals.")
    val_at_start: bool = key(False, "Run a validation before the first step.")
    val_at_end: bool = key(False, "Run a validation after the last step.")
    seed: Seed = key(42, "Random seed for the order of the data and for sampling.")

    policy_epochs: ClassVar[int] = 1
    """The number of passes of the policy over each batch of rollouts."""
    critic_epochs: ClassVar[int] = 0
    """The number of passes of the critic over each batch of rollouts."""
    first_policy_step: ClassVar[int] = 0
    """The first step (from 0) that trains the policy; earlier steps train only the critic."""
    masked_rewards_are_out: ClassVar[bool] = False
    """Whether samples that are not trained on are excluded from the statistics of their group."""
    message_advantages: ClassVar[Mapping[str, float]] = {}
    """Flag of a response -> the advantage that its tokens get; the first flag of a response counts."""
    leave_one_out: ClassVar[bool] = True
    """Whether the logged baseline of a sample excludes its own reward."""

    @property
    def beside_training(self) -> AsyncConfig:
        """The section `async_grpo` or `async_ppo`, which configures rollouts that overlap with training; for a loop
        without such a section, one with `enabled` false."""
        return AsyncConfig()

    @property
    def trajectory_age(self) -> int:
        """The maximum age of a batch when it is trained on, in weight updates since it was generated. 0: each step
        generates its own rollouts."""
        return self.beside_training.max_trajectory_age_steps if self.beside_training.enabled else 0


class LoopConfig(OnePassLoop):
    """The keys that the training loops of GRPO, PPO and distillation share."""

    spellings = {"dapo_batch_multiplier": "batch_multiplier", "max_num_gen_batches": "dynamic_sampling_max_gen_batches"}
    section_name: ClassVar[str] = "grpo"
    """The name of the section, for messages."""

    num_prompts_per_step: Positive = key(32, "Number of prompts per step.")
    num_generations_per_prompt: Positive = key(16, "Number of responses to each prompt (G). They form a group.")
    max_rollout_turns: Positive = 1
    """Maximum number of turns of a rollout: a response and the environment's reply. 1 for tasks such as math."""
    val_start_at: Int = key(-1, "First step at which val_period applies.")
    max_val_samples: Positive | None = 256
    """Number of prompts per validation. null: all prompts of the validation data."""
    val_batch_size: Positive | None = key(256, "Number of validation prompts generated in one batch.")
    val_num_generations_per_prompt: Positive = 1
    """Number of responses to each validation prompt. Above 1, the metric pass_k is logged as well."""
    stop_at_validation_metric: str | None = None
    """Name of a validation metric. Training ends when it reaches stop_at_validation_threshold. null: off."""
    stop_at_validation_threshold: Real | None = None
    """Value of stop_at_validation_metric at which training ends. Set both keys or neither."""
    overlong_filtering: bool = False
    """Do not train on truncated responses. Their rewards still count in the group, see grpo.masked_reward_policy."""
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards differ. More prompts are generated until a step has enough such groups."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """With use_dynamic_sampling: number of batches that may be generated for one step before the run ends with an
    error. Alias: max_num_gen_batches."""
    batch_multiplier: Real = key(1.0, ge=1)
    """With use_dynamic_sampling: num_prompts_per_step times this factor is the number of prompts generated at a time.
    Alias: dapo_batch_multiplier."""
    dynamic_sampling_keep_surplus: bool = False
    """With use_dynamic_sampling: keep groups that a step does not need for the next step. false: drop them."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do not load a reference model. loss_fn.reference_policy_kl_penalty must then be 0."""
    seq_logprob_error_threshold: NonNegative | None = None
    """Do not train on responses whose mean multiplicative log-probability error is above this value. null: no limit."""
    reward_scaling: RewardScalingConfig = section(RewardScalingConfig)
    reward_shaping: RewardShapingConfig = section(RewardShapingConfig)

    @property
    def prompts_per_round(self) -> int:
        """The number of prompts generated at a time: num_prompts_per_step, multiplied by batch_multiplier if dynamic
        sampling is enabled."""
        factor = self.batch_multiplier if self.use_dynamic_sampling else 1
        return int(self.num_prompts_per_step * factor)


class RolloutSamplerConfig(Section):
    """Settings with which NeMo RL's SingleController chooses the rollouts that a step trains on."""

    name: Literal["in_order", "windowed"] = "in_order"
    """Order in which batches are trained. It is the order of their prompts, so that a run repeats. in_order:
    max_lookahead_versions limits their age. windowed: max_staleness_versions does; NeMo RL's order then depends on
    timing."""
    max_lookahead_versions: Count = 1
    """With in_order: sets async_grpo.max_trajectory_age_steps (PPO: async_ppo's). 0: each step has its own rollouts."""
    max_staleness_versions: Count = key(1, "With windowed: the same as max_lookahead_versions with in_order.")


class AsyncRLConfig(Section):
    """Settings of NeMo RL's SingleController, whose rollouts overlap with training. Its key `sampler` is converted to
    keys of async_grpo (in a PPO run, async_ppo). The other keys control queues and time limits, and are ignored."""

    model_config = ConfigDict(extra="allow")
    sampler: RolloutSamplerConfig = section(RolloutSamplerConfig)

    @property
    def beside_training(self) -> dict[str, bool | int]:
        """The keys `enabled` and `max_trajectory_age_steps` of `async_grpo` or `async_ppo`, with the values that have
        the same effect as this section."""
        windowed = self.sampler.name == "windowed"
        age = self.sampler.max_staleness_versions if windowed else self.sampler.max_lookahead_versions
        return {"enabled": age > 0, "max_trajectory_age_steps": max(age, 1)}


class AsyncGRPOConfig(AsyncConfig):
    """Settings of rollouts that overlap with GRPO's training."""

    max_generation_failures: Count = 0
    """Number of rounds of generation and scoring that may fail during a run. A failed round is repeated."""

    failures_allowed = property(attrgetter("max_generation_failures"))


class EstimatorConfig(Section):
    """The base class of the sections of advantage estimators, with the keys that they share."""

    name: str
    kwargs: dict[str, object] = key({}, "Keyword arguments of your own estimator.")
    proximal_teacher_alpha: Real = key(1.0, gt=0, le=1)
    """opd: weight of the teacher in the mixture of teacher and student that the student is compared with (TROPD). 1:
    the teacher alone."""
    subtract_global_baseline: bool = key(False, "opd: subtract the mean advantage over the step's trained tokens.")
    outcome_advantage_weight: NonNegative = 0.0
    """opd: weight of the advantage that the rewards give (in a GRPO run GRPO's, in a PPO run GAE's), which is added to
    the teacher's. 0: the teacher's alone, without a critic."""


class AdvEstimatorConfig(EstimatorConfig):
    """Settings of the advantage estimator, which converts rewards to advantages."""

    name: GRPOEstimator = "grpo"
    """Advantage estimator. grpo: reward minus the mean of the group. gdpo: the same for each reward component, then
    whitened. reinforce_plus_plus: rewards whitened over the batch. opd: per-token advantages from the teachers of
    on_policy_distillation. The others are described in docs/losses.md. Your own class or function is given by its
    dotted name, for example my_module.MyEstimator."""
    normalize_rewards: bool = True
    """grpo, gdpo, grpo_passk: divide advantages by the standard deviation of the rewards of the group."""
    use_leave_one_out_baseline: bool = True
    """grpo, gdpo: the baseline is the mean reward of the group's other samples. false: of the whole group."""
    reward_weights: list[Real] | None = None
    """gdpo: weight of each reward component, in the order of the components' names. null: 1 each."""
    minus_baseline: bool = key(True, "reinforce_plus_plus: subtract the mean reward of the group before whitening.")
    pass_k: Positive = key(4, "pass_at_k: k, the number of responses of which at least one must be correct.")


class GRPOConfig(LoopConfig):
    """Settings of the training loop of GRPO, DAPO and ProRLv2."""

    normalize_rewards: bool = True
    """Value for adv_estimator.normalize_rewards, which reads it as ${grpo.normalize_rewards}."""
    use_leave_one_out_baseline: bool = True
    """Value for adv_estimator.use_leave_one_out_baseline, which reads it as ${grpo.use_leave_one_out_baseline}. It also
    determines the baseline and standard deviation that are logged."""
    advantage_clip_low: Real | None = key(None, "Lower bound of the advantages. null: none.")
    advantage_clip_high: Real | None = key(None, "Upper bound of the advantages. null: none.")
    masked_reward_policy: Literal["include", "exclude"] = "include"
    """Whether samples that are not trained on (because of overlong_filtering, the environment, or a too long prompt)
    count in the baseline and standard deviation of their group, and in dynamic sampling's decision to keep the group.
    include: they count. exclude: they do not."""
    invalid_tool_call_advantage: Real | None = None
    """Rollouts of agents: advantage of the tokens of a response that has a tag of a tool call, for example
    `<tool_call>`, but no complete tool call. The bounds above do not apply to it. null: as the estimator computes."""
    malformed_thinking_advantage: Real | None = None
    """Rollouts of agents: advantage of the tokens of a response with `<think>` or `</think>` in its answer, or, if it
    has no answer, with one of these tags several times in its reasoning. null: as the estimator computes."""
    length_penalty: LengthPenaltyConfig | None = None
    """Length bonuses and penalties within each group, applied before reward_scaling and reward_shaping. null: none."""
    adv_estimator: AdvEstimatorConfig = section(AdvEstimatorConfig)
    async_grpo: AsyncGRPOConfig | None = section(AsyncGRPOConfig)

    @property
    def beside_training(self) -> AsyncConfig:
        return self.async_grpo or AsyncGRPOConfig()

    @property
    def masked_rewards_are_out(self) -> bool:
        return self.masked_reward_policy == "exclude"

    @property
    def message_advantages(self) -> Mapping[str, float]:
        of_flag = {
            "is_invalid_tool_call": self.invalid_tool_call_advantage,
            "has_malformed_thinking": self.malformed_thinking_advantage,
        }
        return {flag: value for flag, value in of_flag.items() if value is not None}

    leave_one_out = property(attrgetter("use_leave_one_out_baseline"))


class DataPlaneConfig(Section):
    """Settings of transfer queues between Ray workers. The section is ignored, because data stays in one process."""

    model_config = ConfigDict(extra="allow")


class AsyncPPOConfig(AsyncConfig):
    """Settings of rollouts that overlap with PPO's training."""


class GAEConfig(EstimatorConfig):
    """Settings of PPO's advantage estimator: generalised advantage estimation, raw rewards, teachers, or your own."""

    name: PPOEstimator = "gae"
    """Advantage estimator. gae: generalised advantage estimation, with a critic. raw_reward: the reward is the
    advantage, without a critic. opd: per-token advantages from the teachers of on_policy_distillation, plus
    outcome_advantage_weight times gae's. Your own class or function is given by its dotted name, for example
    my_module.MyEstimator."""
    uses_critic: bool = key(True, "Train a critic and pass its values to your own estimator.")
    gae_lambda: Fraction = key(0.95, "GAE's lambda. 0 gives one-step TD, 1 gives Monte Carlo returns.")
    gae_gamma: Fraction = key(1.0, "Discount factor per token.")
    normalize_advantages: bool = key(True, "Whiten the advantages over the valid tokens of the batch.")
    gae_lambda_value: Fraction | None = None
    """VAPO: lambda of the returns, which are the critic's targets. null: gae_lambda."""
    gae_lambda_policy: Fraction | None = key(None, "VAPO: lambda of the advantages. null: gae_lambda.")
    length_adaptive_alpha: NonNegative = 0.0
    """VAPO: alpha in the length-adaptive lambda of the advantages, 1 - 1 / (alpha * response length). 0: off."""

    @property
    def computes_gae(self) -> bool:
        """Whether the advantages are, or include, those of generalised advantage estimation."""
        return self.name == "gae" or (self.name == "opd" and self.outcome_advantage_weight > 0)


_ENDLESS = 100000
Epochs = Annotated[Positive, BeforeValidator(lambda count: _ENDLESS if count == -1 else count)]


class PPOConfig(LoopConfig):
    """Settings of the training loop of PPO. Keys that are also in `grpo` have the same meaning."""

    section_name = "ppo"
    max_num_epochs: Epochs = _ENDLESS
    """Number of passes over the data, -1: no limit. Training ends here or after max_num_steps, if that is sooner."""
    max_num_steps: Positive = 100000
    val_period: Int = 20
    val_at_start: bool = True
    skip_reference_policy_logprobs_calculation: bool = True
    ppo_epochs: Positive = 4
    """Number of passes of the policy over each batch of rollouts, and of the critic unless critic_ppo_epochs is set."""
    critic_ppo_epochs: Positive | None = None
    """Number of passes of the critic over each batch of rollouts. null: ppo_epochs."""
    policy_training_start_step: Count = key(0, "Number of steps at the start of the run that train only the critic.")
    warm_start_value_checkpoint: str | None = None
    """Checkpoint folder step_N of another run. A run that starts from scratch takes the critic's weights from it, with
    a new optimizer and schedule. null: none."""
    adv_estimator: GAEConfig = section(GAEConfig)
    async_ppo: AsyncPPOConfig | None = section(AsyncPPOConfig)

    @property
    def beside_training(self) -> AsyncConfig:
        return self.async_ppo or AsyncPPOConfig()

    policy_epochs = property(attrgetter("ppo_epochs"))

    @property
    def critic_epochs(self) -> int:
        return self.critic_ppo_epochs or self.ppo_epochs

    first_policy_step = property(attrgetter("policy_training_start_step"))


def check_loop(loop: LoopConfig, name: str, report: Report) -> None:
    sampling, group = f"{name}.use_dynamic_sampling", f"{name}.num_generations_per_prompt"
    if not loop.use_dynamic_sampling:
        if loop.batch_multiplier != 1:
            text = f"is {loop.batch_multiplier:g}, for dynamic sampling only; set {sampling} to true or this to 1"
            report.add(f"{name}.batch_multiplier", text, sampling)
        if loop.dynamic_sampling_keep_surplus:
            report.add(f"{name}.dynamic_sampling_keep_surplus", f"needs {sampling}: true")
    elif loop.num_generations_per_prompt == 1:
        text = "is 1: rewards of a group of one never differ, so dynamic sampling would keep nothing; set at least 2"
        report.add(group, text, sampling)
    scaling = loop.reward_scaling
    if scaling.enabled and not scaling.source_min < scaling.source_max:
        key = f"{name}.reward_scaling.source_m"
        text = f"{scaling.source_min:g} must be below source_max {scaling.source_max:g}"
        report.add(f"{key}in", text, f"{key}ax")
    loop.reward_shaping.check_together(f"{name}.reward_shaping.", report)
    metric, threshold = loop.stop_at_validation_metric, loop.stop_at_validation_threshold
    if (metric is None) != (threshold is None):
        given, absent = ("metric", "threshold") if threshold is None else ("threshold", "metric")
        text = f"is missing: stop_at_validation_{given} is set; set both or neither"
        report.add(f"{name}.stop_at_validation_{absent}", text, f"{name}.stop_at_validation_{given}")
    if metric is not None and loop.val_period <= 0:
        text = f"needs validations at intervals: set {name}.val_period above 0"
        report.add(f"{name}.stop_at_validation_metric", text, f"{name}.val_period")
    if metric == "pass_k" and loop.val_num_generations_per_prompt < 2:
        number = f"{name}.val_num_generations_per_prompt"
        report.add(f"{name}.stop_at_validation_metric", f"is pass_k, which needs {number} above 1; raise that", number)
