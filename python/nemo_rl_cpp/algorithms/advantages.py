"""The stage of a step that turns rewards into advantages: what an estimator is given, and what becomes of its result.

Estimators are the user's to write, and take padded tensors as in NeMo RL; the batch itself is ragged, and the house's own
estimators take it as it is.
"""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch


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

        One that names `offsets`, int64 [B + 1], among its inputs is given all that is [B, S] here as [T], without padding.
        """


def _takes_ragged(estimator: AdvantageEstimator) -> bool:
    """Whether its compute_advantage names `offsets`: then what belongs to tokens is given as [T] with them, without padding."""
    return "offsets" in inspect.signature(estimator.compute_advantage).parameters


def _inputs(batch: TrainBatch, ragged: bool, **of_tokens: Tensor | None) -> dict[str, Tensor | None]:
    """What every estimator is given, and these, which are [T] or None; padded where it does not take them as they are."""
    of_tokens["mask"] = batch.valid_mask
    if ragged:
        return {**of_tokens, "prompt_ids": batch.input_ids, "rewards": batch.rewards, "offsets": batch.offsets}
    padded = {name: None if value is None else batch.padded(value) for name, value in of_tokens.items()}
    return {**padded, "prompt_ids": batch["input_ids"], "rewards": batch.rewards}


class GroupAdvantages:
    """GRPO's: each sample is compared with the others of its group. Groups go by `group_id`: two equal prompts of a batch are
    two groups.

    With `masked_reward_policy` exclude the samples that get no gradient have no say in their group's statistics. Final
    advantages lie within [advantage_clip_low, advantage_clip_high]; a bound that is None does not bind.
    """

    def __init__(self, estimator: AdvantageEstimator, grpo: GRPOConfig) -> None:
        self.estimator, self._ragged = estimator, _takes_ragged(estimator)
        self._voting = grpo.masked_rewards_are_out
        self._low, self._high = grpo.advantage_clip_low, grpo.advantage_clip_high

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """`advantages` of the batch."""
        advantages = self.estimator.compute_advantage(
            group_id=batch.group_id,
            valid_mask=(batch.sample_mask != 0).float() if self._voting else None,
            repeated_batch=batch,
            **_inputs(
                batch, self._ragged, logprobs_policy=batch.old_logprobs,
                logprobs_reference=batch.tokens.get("reference_policy_logprobs"),
            ),
        )  # fmt: skip
        if self._low is not None or self._high is not None:
            advantages = advantages.clamp(min=self._low, max=self._high)
        batch.advantages = advantages


class TokenAdvantages:
    """PPO's: from the values of the critic's states, or the rewards as they are; with a critic also what it learns from."""

    def __init__(self, estimator: AdvantageEstimator) -> None:
        self.estimator, self._ragged = estimator, _takes_ragged(estimator)

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """`advantages` and, where there is a critic, `returns` of the batch."""
        advantages, returns = self.estimator.compute_advantage(
            **_inputs(
                batch, self._ragged, values=batch.tokens.get("values"), logprobs=batch.old_logprobs,
                reference_logprobs=batch.tokens.get("reference_policy_logprobs"),
            )
        )  # fmt: skip
        batch.advantages = advantages
        if returns is not None:
            batch.returns = returns
