"""The differences between GRPO (with DAPO and ProRLv2), distillation, supervised fine-tuning and PPO. They share
`algorithms/loop.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_cpp.algorithms.advantage_estimator import AdvantageEstimator, GDPOAdvantageEstimator, make_estimator
from nemo_rl_cpp.algorithms.advantages import GroupAdvantages, TokenAdvantages
from nemo_rl_cpp.algorithms.answers import EqualAdvantages
from nemo_rl_cpp.config.data import environments_of_training
from nemo_rl_cpp.config.master import DistillationMasterConfig, GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Message
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.rollouts.batches import TrainBatch, sampled_by_policy, spoken_by_assistant


class Advantages(Protocol):
    """The stage of a training step that computes advantages from rewards."""

    metrics: dict[str, float]
    estimator: AdvantageEstimator

    def add(self, batch: TrainBatch) -> None:
        """Add `advantages` to the batch, and `returns` if a critic learns from them."""


@dataclass(frozen=True)
class Algorithm:
    """The properties of an algorithm that its configuration sections do not describe.

    Attributes:
        make_advantages: returns the `Advantages` object that a configuration selects.
        is_trained: returns whether the policy is trained on a message of a conversation.
        needs_tokens: whether a step without any token to train on ends the run with an error. Without the error, PPO
            would continue and shrink both models by weight decay. GRPO needs no error: it makes a single update per
            step, and the report shows that nothing was learned.
        has_rewards: whether samples have rewards. If not, metrics of rewards are omitted.
    """

    make_advantages: Callable[[TrainMasterConfig], Advantages]
    is_trained: Callable[[Message], bool]
    needs_tokens: bool
    has_rewards: bool = True


def grpo_advantages(config: GRPOMasterConfig) -> GroupAdvantages:
    """Return the `Advantages` object that `grpo.adv_estimator.name` selects. Raise ValueError if GRPO has no such
    estimator.
    """
    estimator = make_estimator("grpo", config.grpo.adv_estimator, config.loss_fn)
    if isinstance(estimator, GDPOAdvantageEstimator):
        estimator.part_weights = _part_weights(config)
    return GroupAdvantages(estimator, config.grpo)


def _part_weights(config: GRPOMasterConfig) -> dict[str, float]:
    """Return GDPO's weights of reward components: the weights of the reward functions, keyed by function name. Return
    {} if no training data set uses reward functions, if their rewards are not components (`as_parts`), or if they have
    no weights. Raise ValueError if `grpo.adv_estimator.reward_weights` is set, too.
    """
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


def distillation_advantages(config: DistillationMasterConfig) -> Advantages:
    """Return the `Advantages` object that `distillation.adv_estimator.name` selects. If the loss compares distributions
    over the top-k tokens of each position, return one that sets all advantages to 1.
    """
    if config.candidates is not None:
        return EqualAdvantages(keeps_logprobs=True)
    return GroupAdvantages(
        make_estimator("grpo", config.distillation.adv_estimator, config.loss_fn), config.distillation
    )


def ppo_advantages(config: PPOMasterConfig) -> TokenAdvantages:
    """Return the `Advantages` object that `ppo.adv_estimator.name` selects. Raise ValueError if PPO has no such
    estimator.
    """
    return TokenAdvantages(make_estimator("ppo", config.ppo.adv_estimator, config.loss_fn))


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo_advantages, is_trained=sampled_by_policy, needs_tokens=False),
    "distillation": Algorithm(distillation_advantages, is_trained=sampled_by_policy, needs_tokens=False),
    "sft": Algorithm(
        lambda config: EqualAdvantages(), is_trained=spoken_by_assistant, needs_tokens=True, has_rewards=False
    ),
    "ppo": Algorithm(ppo_advantages, is_trained=spoken_by_assistant, needs_tokens=True),
}
"""Maps the name of a configuration section to its algorithm."""
