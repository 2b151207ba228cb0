"""The stage of a step that turns rewards into advantages: what an estimator is given, and what becomes of its result.

Estimators are the user's to write, and take padded tensors as in NeMo RL; the batch itself is ragged.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.experience.batches import TrainBatch


class AdvantageEstimator(Protocol):
    """From the rewards of a batch to the advantages of its tokens. The base class of estimators of one's own.

    class Best(nemo_rl_cpp.AdvantageEstimator):
        def compute_advantage(self, rewards, group_id, **batch):
            return rewards - rewards.mean()

    `last_metrics` holds numbers of the last call that are logged with the step.
    """

    last_metrics: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **batch: object
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Advantages float32 [B, S] from `rewards` [B]; `mask` [B, S] is 1 on the tokens that are trained.

        `batch` has what an algorithm knows beside these. GRPO: `group_id` [B], `valid_mask` [B] or None, `repeated_batch`,
        `logprobs_policy` and `logprobs_reference` [B, S] or None. PPO: `values`, `logprobs` and `reference_logprobs` [B, S] or None.
        An estimator of PPO returns (advantages, returns), the latter None where there is no critic.
        """


class GroupAdvantages:
    """GRPO's: each sample is compared with the others of its group. Groups go by `group_id`: two equal prompts of a batch are
    two groups.

    With `masked_reward_policy` exclude the samples that get no gradient have no say in their group's statistics. Final
    advantages lie within [advantage_clip_low, advantage_clip_high]; a bound that is None does not bind.
    """

    def __init__(self, estimator: AdvantageEstimator, grpo: GRPOConfig) -> None:
        self.estimator = estimator
        self._voting = grpo.masked_rewards_are_out
        self._low, self._high = grpo.advantage_clip_low, grpo.advantage_clip_high

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """`advantages` of the batch."""
        advantages = self.estimator.compute_advantage(
            prompt_ids=batch["input_ids"],
            group_id=batch.group_id,
            rewards=batch.rewards,
            mask=batch.padded(batch.valid_mask),
            valid_mask=(batch.sample_mask != 0).float() if self._voting else None,
            repeated_batch=batch,
            logprobs_policy=batch.padded(batch.old_logprobs),
            logprobs_reference=batch.get("reference_policy_logprobs"),
        )
        if self._low is not None or self._high is not None:
            advantages = advantages.clamp(min=self._low, max=self._high)
        batch.advantages = advantages


class TokenAdvantages:
    """PPO's: from the values of the critic's states, or the rewards as they are; with a critic also what it learns from."""

    def __init__(self, estimator: AdvantageEstimator) -> None:
        self.estimator = estimator

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """`advantages` and, where there is a critic, `returns` of the batch."""
        advantages, returns = self.estimator.compute_advantage(
            prompt_ids=batch["input_ids"],
            rewards=batch.rewards,
            mask=batch.padded(batch.valid_mask),
            values=batch.get("values"),
            logprobs=batch.padded(batch.old_logprobs),
            reference_logprobs=batch.get("reference_policy_logprobs"),
        )
        batch.advantages = advantages
        if returns is not None:
            batch.returns = returns
