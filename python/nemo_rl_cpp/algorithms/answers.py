"""Supervised fine-tuning in the shared loop: placeholders for engine, rollouts and advantages, and its validation."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.validation import ValidationResult, Validator
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.policy.train_step import GlobalCounts
from nemo_rl_cpp.rollouts.batches import DatumBatch, TrainBatch, build_train_batch, spoken_by_assistant


class NoEngine:
    """A placeholder for the engine in a run that generates nothing."""

    owns_process = False

    def prepare_for_generation(self) -> bool:
        return True

    def finish_generation(self) -> bool:
        return True


class NoRefit:
    """A placeholder for the weight sync in a run without an engine."""

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        return {}

    def mark_stale(self) -> None:
        pass

    def verify_before_training(self) -> None:
        pass


def given_answers(rows: DatumBatch) -> tuple[DatumBatch, dict[str, float]]:
    """Return the rows as finished rollouts with reward 0: their conversations already hold the answers to train on."""
    rows["total_reward"] = torch.zeros(rows.size)
    rows["truncated"] = torch.zeros(rows.size, dtype=torch.bool)
    return rows, {}


@dataclass
class EqualAdvantages:
    """A stage that gives every token the advantage 1.

    Attributes:
        keeps_logprobs: whether the policy generated the responses, so that `generation_logprobs` are kept.
    """

    keeps_logprobs: bool = False
    estimator: ClassVar[None] = None
    metrics: ClassVar[Metrics] = {}

    def add(self, batch: TrainBatch) -> None:
        """Add `advantages` of 1. Remove `generation_logprobs` unless `keeps_logprobs`."""
        batch.advantages = torch.ones(batch.num_tokens)
        if not self.keeps_logprobs:
            batch.tokens.pop("generation_logprobs", None)


@dataclass(kw_only=True)
class AnswerValidator(Validator):
    """A validator that computes the loss on held-out answers.

    Attributes:
        model: the policy.
        loss_fn: the training loss.
    """

    model: PolicyInterface
    loss_fn: LossFunction

    def gives(self, rollout_names: Collection[str], task_to_env: Mapping[str, Environment]) -> list[str]:
        return ["val_loss", "num_samples", "num_tokens"]

    def run(self, step: int) -> ValidationResult:
        """Return the metrics `val_loss` (the mean over the tokens of all batches), `num_samples` and `num_tokens`. A
        last batch that is not full is ignored, unless it is the only one. Raise ValueError if the answers have no
        tokens.
        """
        start = time.perf_counter()
        losses, tokens, samples = [], 0, 0
        for number, rows in enumerate(self.loader):
            if 0 < self.loop.val_batches <= number or (number and rows.size < self.loop.val_global_batch_size):
                break
            batch = build_train_batch(
                given_answers(rows)[0], pad_token_id=self.tokenizer.pad_token_id, is_trained=spoken_by_assistant,
                divisible_by=self.policy.make_sequence_length_divisible_by,
            )  # fmt: skip
            EqualAdvantages().add(batch)
            if not self.model.skips_prev_logprobs:
                batch.prev_logprobs = batch.ragged(self.model.get_logprobs(batch)["logprobs"])
            result = self.model.train(
                batch, self.loss_fn, eval_mode=True, gbs=batch.size, mbs=self.loop.val_micro_batch_size
            )
            count = int(GlobalCounts.of(batch).valid_toks)
            losses.append(float(result["loss"].sum()) * count)
            tokens, samples = tokens + count, samples + batch.size
        if tokens == 0:
            raise ValueError("the validation data have no token of an answer: check data.validation")
        metrics = {"val_loss": math.fsum(losses) / tokens, "num_samples": samples, "num_tokens": tokens}
        return ValidationResult(metrics, {"total_validation_time": time.perf_counter() - start})
