"""What GRPO (with DAPO and ProRLv2), distillation, supervised fine-tuning and PPO have of their own. The loop is one (`algorithms/loop.py`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_cpp.algorithms.advantage_estimator import (
    AdvantageEstimator,
    GDPOAdvantageEstimator,
    GroupAdvantages,
    TokenAdvantages,
    make_estimator,
)
from nemo_rl_cpp.algorithms.answers import EqualAdvantages
from nemo_rl_cpp.config.data import environments_of_training
from nemo_rl_cpp.config.master import DistillationMasterConfig, GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Message
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.rollouts.batches import TrainBatch, sampled_by_policy, spoken_by_assistant


class Advantages(Protocol):
    """The stage of a step that turns rewards into advantages."""

    metrics: dict[str, float]
    estimator: AdvantageEstimator

    def add(self, batch: TrainBatch) -> None:
        """Add `advantages` to the batch, and `returns` where a critic learns from them."""


@dataclass(frozen=True)
class Algorithm:
    """What is an algorithm's own, beside the sections of its configuration.

    Attributes:
        make_advantages: the stage `Advantages` of a configuration.
        is_trained: which messages of a conversation the policy is trained on.
        needs_tokens: whether a step without a single token to train on ends the run. PPO would go on to shrink both models
            by weight decay, epoch after epoch; a step of GRPO has one update, and the report says that it taught nothing.
    """

    make_advantages: Callable[[TrainMasterConfig], Advantages]
    is_trained: Callable[[Message], bool]
    needs_tokens: bool


def grpo_advantages(config: GRPOMasterConfig) -> GroupAdvantages:
    """Return the stage for `grpo.adv_estimator.name`. Raise ValueError for a name that GRPO has no estimator for."""
    estimator = make_estimator("grpo", config.grpo.adv_estimator, config.loss_fn)
    if isinstance(estimator, GDPOAdvantageEstimator):
        estimator.part_weights = _part_weights(config)
    return GroupAdvantages(estimator, config.grpo)


def _part_weights(config: GRPOMasterConfig) -> dict[str, float]:
    """Return the weights of the reward functions whose rewards are gdpo's parts, by the parts' names. Return {} if no data set of the
    training uses them, or if they have none. Raise ValueError if the estimator has weights, too."""
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


def distillation_advantages(config: DistillationMasterConfig) -> GroupAdvantages:
    """Return the stage for `distillation.adv_estimator.name`."""
    return GroupAdvantages(
        make_estimator("grpo", config.distillation.adv_estimator, config.loss_fn), config.distillation
    )


def ppo_advantages(config: PPOMasterConfig) -> TokenAdvantages:
    """Return the stage for `ppo.adv_estimator.name`. Raise ValueError for a name that PPO has no estimator for."""
    return TokenAdvantages(make_estimator("ppo", config.ppo.adv_estimator, config.loss_fn))


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo_advantages, is_trained=sampled_by_policy, needs_tokens=False),
    "distillation": Algorithm(distillation_advantages, is_trained=sampled_by_policy, needs_tokens=False),
    "sft": Algorithm(lambda config: EqualAdvantages(), is_trained=spoken_by_assistant, needs_tokens=True),
    "ppo": Algorithm(ppo_advantages, is_trained=spoken_by_assistant, needs_tokens=True),
}
"""By the name of their section of the configuration."""
