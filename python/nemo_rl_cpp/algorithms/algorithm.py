"""The differences between GRPO (with DAPO and ProRLv2), distillation, supervised fine-tuning and PPO: which tokens are
trained, and the stage of a training step that computes advantages. They share `algorithms/loop.py`."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms.advantage_estimator import AdvantageEstimator, GDPOAdvantageEstimator, make_estimator
from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.validation import ValidationResult, Validator
from nemo_rl_cpp.config.data import environments_of
from nemo_rl_cpp.config.distillation import DistillationConfig
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.config.master import DistillationMasterConfig, GRPOMasterConfig, TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Message
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.loading import RewardFunctions
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.policy.train_step import global_counts
from nemo_rl_cpp.rollouts import batches
from nemo_rl_cpp.weight_sync import WeightSynchronizer

# ---- supervised fine-tuning: placeholders for engine, rollouts and advantages, and its validation


class NoEngine:
    """A placeholder for the generation engine in a run that generates nothing, such as supervised fine-tuning."""

    owns_process = False

    def prepare_for_generation(self) -> bool:
        return True

    finish_generation = prepare_for_generation


class NoRefit(WeightSynchronizer):
    """A placeholder for the weight sync from trainer to engine, in a run without an engine."""

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        return {}


def given_answers(rows: batches.DatumBatch) -> tuple[batches.DatumBatch, dict[str, float]]:
    """Return (`rows` with the columns of finished rollouts and reward 0, no metrics). Supervised fine-tuning calls this
    instead of generating, because its conversations already contain the responses."""
    rows["total_reward"] = torch.zeros(rows.size)
    rows["truncated"] = torch.zeros(rows.size, dtype=torch.bool)
    return rows, {}


@dataclass
class EqualAdvantages:
    """A stage that gives every token the advantage 1, as in supervised fine-tuning."""

    # whether `generation_logprobs` stay in the batch, because the policy generated the responses
    keeps_logprobs: bool = False

    def add(self, batch: batches.TrainBatch) -> Metrics:
        batch.advantages = torch.ones(batch.num_tokens)
        if not self.keeps_logprobs:
            batch.tokens.pop("generation_logprobs", None)
        return {}


@dataclass(kw_only=True)
class AnswerValidator(Validator):
    """A validator that computes the loss on held-out answers."""

    model: PolicyInterface
    loss_fn: LossFunction

    def gives(self, rollout_names: Collection[str], task_to_env: Mapping[str, Environment]) -> list[str]:
        return ["val_loss", "num_samples", "num_tokens"]

    def run(self, step: int) -> ValidationResult:
        """Return `val_loss` (mean over all tokens), `num_samples` and `num_tokens`. Raise ValueError without tokens."""
        start = time.perf_counter()
        losses, tokens, samples = [], 0, 0
        for number, rows in enumerate(self.loader):
            if 0 < self.loop.val_batches <= number:
                break
            batch = batches.build_train_batch(
                given_answers(rows)[0], pad_token_id=self.tokenizer.pad_token_id, is_trained=batches.spoken_by_assistant,
                divisible_by=self.policy.make_sequence_length_divisible_by,
            )  # fmt: skip
            EqualAdvantages().add(batch)
            if not self.model.skips_prev_logprobs:
                batch.prev_logprobs = batch.ragged(self.model.get_logprobs(batch)["logprobs"])
            options = {"gbs": batch.size, "mbs": self.loop.val_micro_batch_size}
            result = self.model.train(batch, self.loss_fn, eval_mode=True, **options)
            count = int(global_counts(batch).valid_toks)
            losses.append(float(result["loss"].sum()) * count)
            tokens, samples = tokens + count, samples + batch.size
        if tokens == 0:
            raise ValueError("the validation data have no token of an answer: check data.validation")
        metrics = {"val_loss": math.fsum(losses) / tokens, "num_samples": samples, "num_tokens": tokens}
        return ValidationResult(metrics, {"total_validation_time": time.perf_counter() - start})


# ---- advantages


class _EstimatedAdvantages:
    """The base class of stages that compute advantages with an estimator."""

    def __init__(self, estimator: AdvantageEstimator) -> None:
        self.estimator = estimator
        self._ragged = "offsets" in inspect.signature(estimator.compute_advantage).parameters

    def _inputs(self, batch: batches.TrainBatch, **of_tokens: Tensor | None) -> dict[str, Tensor | None]:
        """Return the arguments of `compute_advantage` that every estimator takes, and the per-token tensors
        `of_tokens`: [T] if that method has a parameter `offsets`, otherwise padded to [B, S]."""
        of_tokens["mask"] = batch.valid_mask
        if "teacher_logprobs" in batch:
            of_tokens |= {"teacher_logprobs": batch.teacher_logprobs, "prev_logprobs": batch.old_logprobs}
        if self._ragged:
            return {**of_tokens, "prompt_ids": batch.input_ids, "rewards": batch.rewards, "offsets": batch.offsets}
        padded = {name: None if value is None else batch.padded(value) for name, value in of_tokens.items()}
        return {**padded, "prompt_ids": batch["input_ids"], "rewards": batch.rewards}


class GroupAdvantages(_EstimatedAdvantages):
    """The stage that computes advantages in GRPO, by comparing each sample with the others of its `group_id`. If
    `masked_reward_policy` is exclude, statistics exclude samples without a gradient. Advantages are clipped to
    [advantage_clip_low, advantage_clip_high]; None means no bound."""

    def __init__(self, estimator: AdvantageEstimator, grpo: GRPOConfig | DistillationConfig) -> None:
        super().__init__(estimator)
        self._voting = grpo.masked_rewards_are_out
        self._low, self._high = grpo.advantage_clip_low, grpo.advantage_clip_high

    def add(self, batch: batches.TrainBatch) -> Metrics:
        """Add `advantages` to the batch, and return the estimator's metrics."""
        reference = batch.tokens.get("reference_policy_logprobs")
        of_tokens = {"logprobs_policy": batch.old_logprobs, "logprobs_reference": reference}
        if "sum_pi_squared" in batch:
            current = batch.tokens.get("current_logprobs", batch.old_logprobs)
            of_tokens |= {"sum_pi_squared": batch.sum_pi_squared, "logprobs_policy": current}
        advantages = self.estimator.compute_advantage(
            group_id=batch.group_id,
            valid_mask=(batch.sample_mask != 0).float() if self._voting else None,
            repeated_batch=batch,
            **self._inputs(batch, **of_tokens),
        )
        if self._low is not None or self._high is not None:
            advantages = advantages.clamp(min=self._low, max=self._high)
        batch.advantages = advantages
        return dict(self.estimator.last_metrics)


class TokenAdvantages(_EstimatedAdvantages):
    """The stage that computes advantages in PPO, from the critic's values or from the raw rewards."""

    def add(self, batch: batches.TrainBatch) -> Metrics:
        """Add `advantages` and, with a critic, `returns` to the batch, and return the estimator's metrics."""
        reference = batch.tokens.get("reference_policy_logprobs")
        inputs = self._inputs(
            batch, values=batch.tokens.get("values"), logprobs=batch.old_logprobs, reference_logprobs=reference
        )
        batch.advantages, returns = self.estimator.compute_advantage(**inputs)
        if returns is not None:
            batch.returns = returns
        return dict(self.estimator.last_metrics)


Advantages = GroupAdvantages | TokenAdvantages | EqualAdvantages
"""The stage of a training step that computes advantages from rewards."""


@dataclass(frozen=True)
class Algorithm:
    """The properties in which algorithms differ in the training loop: how advantages are computed, which messages are
    trained on, and whether there are rewards."""

    # returns the `Advantages` object that a configuration selects. Raises ValueError if the algorithm has no such
    # estimator.
    make_advantages: Callable[[TrainMasterConfig], Advantages]
    is_trained: Callable[[Message], bool]  # returns whether the policy is trained on a message of a conversation
    # whether a step without any token to train on ends the run with an error. Its updates would have no gradient: AdamW's
    # moments and weight decay alone would change the weights, of both models in PPO, as often as a step has updates. A
    # GRPO run continues as in NeMo RL, and the report shows that nothing was learned.
    needs_tokens: bool
    # whether samples have rewards. If not, nothing was generated: metrics of rewards and rollouts are omitted.
    has_rollouts: bool = True


def grpo_advantages(config: GRPOMasterConfig) -> GroupAdvantages:
    """Return the `Advantages` object that `grpo.adv_estimator.name` selects."""
    estimator = make_estimator("grpo", config.grpo.adv_estimator, config.loss_fn)
    if isinstance(estimator, GDPOAdvantageEstimator):
        estimator.part_weights = _part_weights(config)
    return GroupAdvantages(estimator, config.grpo)


def _part_weights(config: GRPOMasterConfig) -> dict[str, float]:
    """Return {name of a reward function: weight} for GDPO. Return {} if the section `env.reward_functions` is not used,
    sets no weights, or adds the rewards up instead of keeping them as components (`as_parts`)."""
    section = config.env.get("reward_functions")
    if not isinstance(section, Mapping) or not section.get("as_parts") or section.get("weights") is None:
        return {}
    is_used = "reward_functions" in environments_of(config.data, "data.train")
    return RewardFunctions.of(section).weight_of_name if is_used else {}


def distillation_advantages(config: DistillationMasterConfig) -> GroupAdvantages | EqualAdvantages:
    """Return the `Advantages` object that `distillation.adv_estimator.name` selects; all advantages are 1 if the loss
    compares distributions over the top-k tokens."""
    if config.candidates is not None:
        return EqualAdvantages(keeps_logprobs=True)
    estimator = make_estimator("grpo", config.distillation.adv_estimator, config.loss_fn)
    return GroupAdvantages(estimator, config.distillation)


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo_advantages, is_trained=batches.sampled_by_policy, needs_tokens=False),
    "distillation": Algorithm(distillation_advantages, is_trained=batches.sampled_by_policy, needs_tokens=False),
    "sft": Algorithm(
        lambda config: EqualAdvantages(), is_trained=batches.spoken_by_assistant, needs_tokens=True, has_rollouts=False
    ),
    "ppo": Algorithm(
        lambda config: TokenAdvantages(make_estimator("ppo", config.ppo.adv_estimator, config.loss_fn)),
        is_trained=batches.spoken_by_assistant,
        needs_tokens=True,
    ),
}
"""Maps the name of a configuration section to its algorithm."""
