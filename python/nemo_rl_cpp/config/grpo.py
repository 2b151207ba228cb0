"""The `grpo` section."""

from typing import Literal

from pydantic import ConfigDict

from .base import Count, Real, Section, key, section
from .estimators import GRPOEstimator
from .length_penalty import LengthPenaltyConfig
from .loop import AsyncConfig, LoopConfig


class AsyncGRPOConfig(AsyncConfig):
    """Rollouts beside the training of GRPO."""

    max_generation_failures: Count = key(
        0, "rounds of generation and scoring that may fail in a run; a failed one is done again"
    )

    @property
    def failures_allowed(self) -> int:
        return self.max_generation_failures


class AdvEstimatorConfig(Section):
    """How rewards become advantages."""

    name: GRPOEstimator = key(
        "grpo",
        "grpo: reward minus the group's mean; gdpo: the same for each part of the reward, then the weighted sum is whitened; "
        "reinforce_plus_plus: whitened over the batch's tokens; or a class or function of yours, as my_module.MyEstimator",
    )
    kwargs: dict[str, object] = key({}, "keyword arguments of an estimator of yours")
    normalize_rewards: bool = key(True, "grpo, gdpo: divide by the group's standard deviation")
    use_leave_one_out_baseline: bool = key(
        True, "grpo, gdpo: a sample's baseline is the mean reward of the other samples of its group"
    )
    reward_weights: list[Real] | None = key(
        None, "gdpo: a factor for each part of the reward, in the order of the parts' names; null: 1 each"
    )
    minus_baseline: bool = key(True, "reinforce_plus_plus: subtract the group's mean first")


class GRPOConfig(LoopConfig):
    """The training loop of GRPO, DAPO and ProRLv2."""

    normalize_rewards: bool = key(True, "read by adv_estimator through ${grpo.normalize_rewards}")
    use_leave_one_out_baseline: bool = key(
        True, "baseline and deviation for logging; read by adv_estimator through ${grpo.use_leave_one_out_baseline}"
    )
    advantage_clip_low: Real | None = key(None, "lower bound of final advantages")
    advantage_clip_high: Real | None = key(None, "upper bound of final advantages")
    masked_reward_policy: Literal["include", "exclude"] = key(
        "include",
        "whether samples without a gradient (overlong_filtering, masked by the environment, prompts too long) count in their group's "
        "baseline and deviation, and in whether dynamic sampling keeps it",
    )
    length_penalty: LengthPenaltyConfig | None = key(
        None, "bonuses and penalties on length within each group, before reward_scaling and reward_shaping; null: none"
    )
    adv_estimator: AdvEstimatorConfig = section(AdvEstimatorConfig, "how rewards become advantages")
    async_grpo: AsyncGRPOConfig | None = section(AsyncGRPOConfig, "rollouts beside training; null: not")

    @property
    def beside_training(self) -> AsyncConfig:
        return self.async_grpo or AsyncGRPOConfig()

    @property
    def masked_rewards_are_out(self) -> bool:
        return self.masked_reward_policy == "exclude"

    @property
    def leave_one_out(self) -> bool:
        return self.use_leave_one_out_baseline


class RewardPenaltyConfig(Section):
    """Penalties of NeMo Gym, which are not supported."""


class DataPlaneConfig(Section):
    """Transfer queues between Ray workers; data stays in one process here."""

    model_config = ConfigDict(extra="allow")
