"""The stages of a training step that call an advantage estimator: GRPO's and PPO's."""

import inspect

from torch import Tensor

from nemo_rl_cpp.algorithms.custom_components import AdvantageEstimator
from nemo_rl_cpp.config.distillation import DistillationConfig
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch


def _takes_ragged(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator's compute_advantage has a parameter `offsets`. If so, per-token inputs are passed as
    [T], without padding.
    """
    return "offsets" in inspect.signature(estimator.compute_advantage).parameters


def _inputs(batch: TrainBatch, ragged: bool, **of_tokens: Tensor | None) -> dict[str, Tensor | None]:
    """Return the keyword arguments of `compute_advantage`: those that all estimators take, the per-token tensors
    `of_tokens` (each [T] or None), and the log-probabilities of a teacher, if the batch has them. Per-token tensors are
    padded to [B, S] unless `ragged`.
    """
    of_tokens["mask"] = batch.valid_mask
    if "teacher_logprobs" in batch:
        of_tokens |= {"teacher_logprobs": batch.teacher_logprobs, "prev_logprobs": batch.old_logprobs}
    if ragged:
        return {**of_tokens, "prompt_ids": batch.input_ids, "rewards": batch.rewards, "offsets": batch.offsets}
    padded = {name: None if value is None else batch.padded(value) for name, value in of_tokens.items()}
    return {**padded, "prompt_ids": batch["input_ids"], "rewards": batch.rewards}


class GroupAdvantages:
    """The stage that computes advantages in GRPO. It compares each sample with the others of its group. `group_id`
    defines the groups, so two equal prompts of a batch are two groups.

    If `masked_reward_policy` is exclude, a group's statistics exclude samples that receive no gradient. Advantages are
    clipped to [advantage_clip_low, advantage_clip_high]; None means no bound.
    """

    def __init__(self, estimator: AdvantageEstimator, grpo: GRPOConfig | DistillationConfig) -> None:
        self.estimator, self._ragged = estimator, _takes_ragged(estimator)
        self._voting = grpo.masked_rewards_are_out
        self._low, self._high = grpo.advantage_clip_low, grpo.advantage_clip_high

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """Add `advantages` to the batch."""
        weights = {"sum_pi_squared": batch.sum_pi_squared} if "sum_pi_squared" in batch else {}
        advantages = self.estimator.compute_advantage(
            group_id=batch.group_id,
            valid_mask=(batch.sample_mask != 0).float() if self._voting else None,
            repeated_batch=batch,
            **_inputs(
                batch, self._ragged, logprobs_policy=batch.old_logprobs,
                logprobs_reference=batch.tokens.get("reference_policy_logprobs"), **weights,
            ),
        )  # fmt: skip
        if self._low is not None or self._high is not None:
            advantages = advantages.clamp(min=self._low, max=self._high)
        batch.advantages = advantages


class TokenAdvantages:
    """The stage that computes advantages in PPO, from the critic's values or from the raw rewards. With a critic it
    also computes the returns, the critic's targets.
    """

    def __init__(self, estimator: AdvantageEstimator) -> None:
        self.estimator, self._ragged = estimator, _takes_ragged(estimator)

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.estimator.last_metrics)

    def add(self, batch: TrainBatch) -> None:
        """Add `advantages` and, with a critic, `returns` to the batch."""
        advantages, returns = self.estimator.compute_advantage(
            **_inputs(
                batch, self._ragged, values=batch.tokens.get("values"), logprobs=batch.old_logprobs,
                reference_logprobs=batch.tokens.get("reference_policy_logprobs"),
            )
        )  # fmt: skip
        batch.advantages = advantages
        if returns is not None:
            batch.returns = returns
