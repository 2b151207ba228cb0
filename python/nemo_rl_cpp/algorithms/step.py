"""Stages of a training step: shaped rewards, masked samples, epochs of training, what is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.algorithms.observe import StepReport
from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping
from nemo_rl_cpp.algorithms.reward_scaling import scale_rewards
from nemo_rl_cpp.algorithms.seq_logprob_error import compute_and_apply_seq_logprob_error_masking
from nemo_rl_cpp.algorithms.step_metrics import (
    baseline_metrics,
    batch_metrics,
    mean_over_epochs,
    rollout_table,
    training_metrics,
)
from nemo_rl_cpp.algorithms.utils import calculate_baseline_and_std_per_prompt
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.experience.batches import Rollouts, TrainBatch
from nemo_rl_cpp.telemetry.timer import Timer

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.collection import Collected
    from nemo_rl_cpp.algorithms.run import TrainingRun
    from nemo_rl_cpp.algorithms.step_metrics import Metrics


def shape_rewards(rollouts: Rollouts, loop: LoopConfig) -> Rollouts:
    """`reward_scaling`, then `reward_shaping`."""
    return apply_reward_shaping(scale_rewards(rollouts, loop.reward_scaling), loop.reward_shaping, quiet=True)


class NothingToTrainOnError(RuntimeError):
    """A batch without a single token to train on."""


def require_valid_tokens(samples: Rollouts, batch: TrainBatch, section: str) -> None:
    """Raises NothingToTrainOnError where every token is masked: an optimizer step would only shrink the weights."""
    if bool(batch.is_valid.any()):
        return
    cut = int(samples.truncated.sum())
    raise NothingToTrainOnError(
        f"no token is left to train on: all {batch.size} samples of this step are masked, {cut} of them were cut off; raise "
        f"policy.generation.max_new_tokens, or look at {section}.overlong_filtering, {section}.seq_logprob_error_threshold and the prompts' lengths"
    )


def mask_by_logprob_error(batch: TrainBatch, threshold: float | None) -> dict[str, float]:
    """Drops sequences by `seq_logprob_error_threshold`; nothing to measure where generation is the training forward."""
    if "prev_logprobs" not in batch:
        return {}
    metrics = compute_and_apply_seq_logprob_error_masking(batch, batch.rewards, threshold)
    return metrics | {"num_masked_seqs_by_logprob_error": metrics["num_masked_seqs"]}


def train_epochs(run: TrainingRun, batch: TrainBatch, timer: Timer) -> dict[str, float]:
    """Trains the critic and the policy on the batch, in turns, each for its epochs. The metrics, as means over epochs."""
    loop, epochs = run.config.loop, []
    for epoch in range(max(loop.policy_epochs, loop.critic_epochs)):
        epochs.append({})
        if epoch < loop.critic_epochs:
            epochs[-1] |= run.critic.train(batch, timer)
        if epoch < loop.policy_epochs and run.state.step >= loop.first_policy_step:
            with timer("policy_training"):
                epochs[-1] |= train_policy(run, batch, timer)
    return mean_over_epochs(epochs)


def train_policy(run: TrainingRun, batch: TrainBatch, timer: Timer) -> dict[str, float]:
    """One pass over the batch. The first one leaves the old policy's log-probabilities in it for those that follow."""
    run.policy.prepare_for_training()
    result = run.policy.train(batch, run.loss_fn, timer=timer)
    run.policy.finish_training()
    run.refit.mark_stale()
    if run.config.loop.policy_epochs > 1:
        batch.prev_logprobs = result["prev_logprobs"]
    return training_metrics(result)


def report_step(run: TrainingRun, collected: Collected, batch: TrainBatch, metrics: Metrics) -> StepReport:
    """Everything that is logged of a step but its times."""
    samples, rollout_metrics = collected.samples, collected.rollout_metrics
    rewards, groups = batch.rewards, batch.group_id[:, None]
    baseline, _ = calculate_baseline_and_std_per_prompt(
        groups, rewards, torch.ones_like(rewards), leave_one_out_baseline=run.config.loop.leave_one_out
    )
    metrics = metrics | rollout_metrics | batch_metrics(samples, batch) | baseline_metrics(baseline)
    stale = {"stale_samples": metrics["stale_samples"]}  # by the weights that train, not those that have generated
    metrics |= collected.sampler_metrics | stale | run.advantages.metrics
    trained = batch.is_valid
    histograms = {"baseline_reward": baseline.tolist()}
    names = [name for name in ("advantages", "values", "returns") if name in batch]
    histograms |= {name: batch.tokens[name][trained].tolist() for name in names}
    return StepReport(
        metrics=metrics,
        table=rollout_table(samples, batch),
        histograms=histograms,
        generated_tokens=rollout_metrics.get("total_generated_tokens"),
        rollout_names=frozenset(rollout_metrics),
    )
