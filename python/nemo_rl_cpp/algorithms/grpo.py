"""GRPO, DAPO and ProRLv2: what is theirs. The loop is `algorithms/loop.py`, the same as PPO's."""

from collections.abc import Mapping

from nemo_rl_cpp.algorithms.advantage_estimator import ReinforcePlusPlusAdvantageEstimator, make_estimator
from nemo_rl_cpp.algorithms.advantages import GroupAdvantages
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.loop import train_loop as grpo_train
from nemo_rl_cpp.algorithms.run import Algorithm
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.grpo import AdvEstimatorConfig, GRPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.experience.train_batch import sampled_by_policy

GRPOSaveState = TrainState
MasterConfig = GRPOMasterConfig


def make_advantages(config: GRPOMasterConfig) -> GroupAdvantages:
    """By `grpo.adv_estimator.name`; ValueError for a name that GRPO has no estimator for."""
    return GroupAdvantages(make_estimator("grpo", _with_reward_weights(config), config.loss_fn), config.grpo)


def _with_reward_weights(config: GRPOMasterConfig) -> AdvEstimatorConfig:
    """The estimator's section; gdpo weighs reward functions that are its parts by their own weights, where it has none."""
    settings, section = config.grpo.adv_estimator, config.env.get("reward_functions")
    if settings.name != "gdpo" or settings.reward_weights is not None or not isinstance(section, Mapping):
        return settings
    if not section.get("as_parts") or section.get("weights") is None:
        return settings
    return settings.model_copy(update={"reward_weights": RewardFunctionEnvironment(section).weights_by_name})


ALGORITHM = Algorithm(make_advantages=make_advantages, is_trained=sampled_by_policy, needs_tokens=False)

__all__ = [
    "ALGORITHM", "GRPOConfig", "GRPOSaveState", "MasterConfig", "ReinforcePlusPlusAdvantageEstimator", "dynamic_sampling", "grpo_train",
    "make_advantages",
]  # fmt: skip
