"""GRPO, DAPO and ProRLv2: what is theirs. The loop is `algorithms/loop.py`, the same as PPO's."""

from collections.abc import Mapping

from nemo_rl_cpp.algorithms.advantage_estimator import (
    GDPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
    make_estimator,
)
from nemo_rl_cpp.algorithms.advantages import GroupAdvantages
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.loop import train_loop as grpo_train
from nemo_rl_cpp.algorithms.run import Algorithm
from nemo_rl_cpp.config.data import environments_of_training
from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.rollouts.train_batch import sampled_by_policy

MasterConfig = GRPOMasterConfig


def make_advantages(config: GRPOMasterConfig) -> GroupAdvantages:
    """By `grpo.adv_estimator.name`; ValueError for a name that GRPO has no estimator for."""
    estimator = make_estimator("grpo", config.grpo.adv_estimator, config.loss_fn)
    if isinstance(estimator, GDPOAdvantageEstimator):
        estimator.part_weights = _part_weights(config)
    return GroupAdvantages(estimator, config.grpo)


def _part_weights(config: GRPOMasterConfig) -> dict[str, float]:
    """The weights of the reward functions whose own rewards are gdpo's parts, by the parts' names. Empty where no data set of the
    training uses these functions, and where they have no weights. ValueError where the estimator has weights too."""
    section = config.env.get("reward_functions")
    if not isinstance(section, Mapping) or not section.get("as_parts") or section.get("weights") is None:
        return {}
    if "reward_functions" not in environments_of_training(config.data):
        return {}
    if config.grpo.adv_estimator.reward_weights is not None:
        raise ValueError(
            "env.reward_functions.weights and grpo.adv_estimator.reward_weights are the same thing: give one of them"
        )
    return RewardFunctionEnvironment(section).weight_of_name


ALGORITHM = Algorithm(make_advantages=make_advantages, is_trained=sampled_by_policy, needs_tokens=False)

__all__ = [
    "ALGORITHM", "GRPOConfig", "MasterConfig", "ReinforcePlusPlusAdvantageEstimator", "dynamic_sampling", "grpo_train",
    "make_advantages",
]  # fmt: skip
