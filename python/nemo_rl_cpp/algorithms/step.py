"""The stages of a training step after its rollouts: masking, token selection, critic, training epochs, metrics."""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_rl_cpp import ops
from nemo_rl_cpp.algorithms import step_metrics
from nemo_rl_cpp.algorithms.collector import Collected
from nemo_rl_cpp.algorithms.hooks import StepResult
from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.interfaces import TrainingResult, ValueInterface
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch, sampled_by_policy

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.build import TrainingRun


class NothingToTrainOnError(RuntimeError):
    """Raised if a batch has no token to train on."""


def require_valid_tokens(samples: Rollouts, batch: TrainBatch, loop: LoopConfig) -> None:
    """Raise NothingToTrainOnError if every token of `batch` is masked, because an optimizer step would then only decay
    the weights."""
    if bool(batch.is_valid.any()):
        return
    cut, section = int(samples.truncated.sum()) if loop.overlong_filtering else 0, loop.section_name
    advice = f"look at {section}.seq_logprob_error_threshold, mask_sample of the environment and the prompts' lengths"
    if cut:
        advice = f"raise policy.generation.max_new_tokens, set {section}.overlong_filtering to false, or {advice}"
    raise NothingToTrainOnError(
        f"no token is left to train on: all {batch.size} samples of this step are masked, {cut} of them because they were cut off; {advice}"
    )


def mask_by_logprob_error(batch: MutableMapping[str, Tensor], threshold: float | None) -> dict[str, float]:
    """Measure how much the generator's and the trainer's log-probabilities differ per sequence, and return the metrics.
    With a threshold, set sample_mask to 0 for sequences whose error exceeds it. Without `prev_logprobs` in the batch do
    nothing.

    The error of sequence b is e_b = sum_t exp(|generation - prev| M) M / max(sum_t M, 1) over its shifted tokens, with
    M the token mask. The metrics are max_, mean_ and min_seq_mult_prob_error over the sequences with a trained token (0
    if there are none); the same three with the suffix `_after_mask`, over the sequences that are not masked;
    num_masked_seqs, also as num_masked_seqs_by_logprob_error; and masked_correct_pct, the share of masked sequences
    with reward 1."""
    if "prev_logprobs" not in batch:
        return {}
    sample_mask = batch["sample_mask"]
    mask = batch["token_mask"][:, 1:] * sample_mask.unsqueeze(-1)
    gap = (batch["generation_logprobs"][:, 1:] - batch["prev_logprobs"][:, 1:]).abs()
    gap = torch.where(mask != 0, gap, torch.zeros_like(gap))
    error = (torch.exp(gap * mask) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    measured = mask.sum(-1) != 0  # only a sequence with a trained token has an error
    metrics = _extrema(error, measured, "")
    masked, correct = 0, 0.0
    if threshold is not None:
        drop = (error > threshold) & measured
        masked = int(drop.sum())
        if masked:
            correct = float((batch["rewards"][drop] == 1).float().mean())
            batch["sample_mask"] = sample_mask = torch.where(drop, torch.zeros_like(sample_mask), sample_mask)
    metrics |= _extrema(error, measured & (sample_mask != 0), "_after_mask")
    metrics |= {"num_masked_seqs": masked, "masked_correct_pct": correct}
    return metrics | {"num_masked_seqs_by_logprob_error": masked}


def _extrema(error: Tensor, valid: Tensor, suffix: str) -> dict[str, float]:
    values = error[valid] if valid.any() else error.new_zeros(1)
    return {
        f"max_seq_mult_prob_error{suffix}": values.max().item(),
        f"mean_seq_mult_prob_error{suffix}": values.mean().item(),
        f"min_seq_mult_prob_error{suffix}": values.min().item(),
    }


def train_epochs(run: TrainingRun, batch: TrainBatch, timer: Timer) -> dict[str, float]:
    """Train critic and policy on the batch, alternating, each for its number of epochs, and return mean metrics. The
    policy's first epoch stores the old policy's log-probabilities in the batch for the others."""
    loop, of_critic, of_policy = run.config.loop, [], []
    for epoch in range(max(loop.policy_epochs, loop.critic_epochs)):
        if epoch < loop.critic_epochs:
            of_critic.append(run.critic.train(batch, timer))
        if epoch < loop.policy_epochs and run.state.step >= loop.first_policy_step:
            with timer("policy_training"):
                result = run.policy.train(batch, run.loss_fn)
                run.collector.refit.mark_stale()
                if loop.policy_epochs > 1:
                    batch.prev_logprobs = result["prev_logprobs"]
                of_policy.append(step_metrics.training_metrics(result))
    return step_metrics.mean_over_epochs(of_critic, of_policy)


def step_result(run: TrainingRun, collected: Collected, batch: TrainBatch, metrics: step_metrics.Metrics) -> StepResult:
    """Return what is logged for a step, except durations; without rewards, no metrics of rewards and rollouts."""
    samples, has_rollouts = collected.samples, run.algorithm.has_rollouts
    of_groups = ops.group_baseline(batch.rewards, batch.group_id, leave_one_out=run.config.loop.leave_one_out)
    logged = metrics | collected.rollout_metrics | step_metrics.batch_metrics(samples, batch)
    logged |= step_metrics.baseline_metrics(of_groups.baseline) | collected.sampler_metrics
    histograms = {}
    if has_rollouts:
        names = [name for name in ("advantages", "values", "returns") if name in batch]
        histograms = {"baseline_reward": of_groups.baseline.tolist()}
        histograms |= {name: batch.tokens[name][batch.is_valid].tolist() for name in names}
    return StepResult(
        state=run.state,
        metrics=logged if has_rollouts else step_metrics.without_rollouts(logged),
        table=step_metrics.rollout_table(samples, batch),
        histograms=histograms,
        rollout_names=frozenset(collected.rollout_metrics),
    )


@dataclass
class Critic:
    """The critic: a value model and its loss."""

    model: ValueInterface
    loss_fn: LossFunction

    def add_values(self, batch: TrainBatch, timer: Timer) -> None:
        with timer("value_inference"):
            batch.values = self.model.get_values(batch)["values"]

    def train(self, batch: TrainBatch, timer: Timer) -> dict[str, float]:
        """Train the critic for one pass over the batch, towards its `returns`, and return the metrics `critic/*`."""
        with timer("value_training"):
            result = self.model.train(batch, self.loss_fn)
        return critic_metrics(result)


class NoCritic:
    """A placeholder for the critic in runs without one: GRPO, and PPO on raw rewards. It does nothing."""

    def add_values(self, batch: TrainBatch, timer: Timer) -> None:
        pass

    def train(self, batch: TrainBatch, timer: Timer) -> dict[str, float]:
        return {}


def critic_metrics(value_results: TrainingResult) -> dict[str, float]:
    """Return the metrics of one `Value.train` call, under `critic/`, with the explained variance of the returns R by
    the values V of the training forward pass, over the valid tokens: 1 - Var(R - V) / max(Var(R), 1e-8)."""
    metrics = step_metrics.training_metrics(value_results)
    returns, values = metrics.get("returns_mean", 0.0), metrics.get("values_mean", 0.0)
    residual_variance = metrics.get("residual_sq_mean", 0.0) - (returns - values) ** 2
    variance = metrics.get("returns_sq_mean", 0.0) - returns**2
    metrics["explained_var"] = 1.0 - residual_variance / max(variance, 1e-8)
    return {f"critic/{name}": value for name, value in metrics.items()}


# ---- responses whose advantages are replaced


def overwrite_advantages(
    batch: TrainBatch, logs: Sequence[LLMMessageLogType], of_flag: Mapping[str, float]
) -> dict[str, float]:
    """Replace the advantages of flagged responses. `of_flag` maps each flag to the advantage that all tokens of a
    response with this flag get; if a response has several flags, the first in `of_flag` counts. Return the numbers and
    shares of flagged responses, under NeMo RL's metric names."""
    if not of_flag:
        return {}
    advantages, begin = batch.advantages.clone(), 0
    changed, responses = {"is_invalid_tool_call": 0, "has_malformed_thinking": 0}, 0
    for message in (message for log in logs for message in log):
        end = begin + message["token_ids"].numel()
        if sampled_by_policy(message):
            responses += 1
            if (flag := next((flag for flag in of_flag if message.get(flag)), None)) is not None:
                advantages[begin:end] = of_flag[flag]
                changed[flag] += 1
        begin = end
    batch.advantages = advantages
    calls, thinking = changed["is_invalid_tool_call"], changed["has_malformed_thinking"]
    return {
        "invalid_tool_call_rate": calls / max(responses, 1), "malformed_thinking_rate": thinking / max(responses, 1),
        "num_invalid_tool_calls": calls, "num_malformed_thinking": thinking, "num_assistant_messages": responses,
    }  # fmt: skip


# ---- selection of the tokens on which the policy trains


def select_tokens(batch: TrainBatch, loss: ClippedPGLossConfig, seed: int, step: int) -> dict[str, float]:
    """Select the tokens on which the loss acts, and set the advantages of other trained tokens to 0; for kl_cov,
    instead add `kl_cov_penalty` [T], the KL weight `ppo_kl_coef` of selected tokens. Tokens are compared over the whole
    step; `seed` and `step` determine clip_cov's random selection. Return `selected_tokens_share` of the trained tokens,
    or {} if the loss selects none."""
    kept = valid = batch.is_valid
    if loss.name == "kl_cov":
        kept = _largest(_covariance(batch, valid), valid, loss.kl_cov_ratio)
        batch.tokens["kl_cov_penalty"] = kept.float() * loss.ppo_kl_coef
    else:
        if loss.top_entropy_quantile < 1:
            kept = kept & _most_uncertain(batch.entropies, valid, loss.top_entropy_quantile)
        if loss.name == "clip_cov":
            within = (loss.clip_cov_lb, loss.clip_cov_ub)
            kept = kept & ~_drawn(_covariance(batch, valid), valid, within, loss.clip_cov_ratio, (seed, step))
        if kept is valid:
            return {}
        batch.advantages = torch.where(kept | ~valid, batch.advantages, 0.0)
    return {"selected_tokens_share": kept.sum().item() / max(int(valid.sum()), 1)}


def _covariance(batch: TrainBatch, valid: Tensor) -> Tensor:
    """Return float64 [T]: (A - mean A) (log p - mean log p) of each trained token, 0 elsewhere. Its mean is the
    covariance that sets how fast the entropy falls (arXiv:2505.22617, eq. 7)."""
    covariance = torch.zeros(batch.num_tokens, dtype=torch.float64)
    advantages, logprobs = batch.advantages[valid].double(), batch.old_logprobs[valid].double()
    covariance[valid] = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    return covariance


def _largest(covariance: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T]: the fraction `share` of the trained tokens, at least one, with the largest `covariance`."""
    chosen, places = torch.zeros_like(valid), valid.nonzero().flatten()
    order = covariance[places].argsort(descending=True, stable=True)
    chosen[places[order[: max(int(share * len(places)), 1)]]] = True
    return chosen


def _drawn(
    covariance: Tensor, valid: Tensor, within: tuple[float, float], share: float, seed: tuple[int, int]
) -> Tensor:
    """Return bool [T]: tokens that Clip-Cov excludes, drawn by `seed` from the trained tokens whose covariance is
    `within` the bounds. Their number is `share` of all trained tokens, at least one, if there are enough."""
    generator = random.Random((seed[0] << 32) + seed[1])
    chosen = torch.zeros_like(valid)
    places = (valid & (covariance > within[0]) & (covariance < within[1])).nonzero().flatten().tolist()
    chosen[generator.sample(places, min(max(int(share * int(valid.sum())), 1), len(places)))] = True
    return chosen


def _most_uncertain(entropies: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T]: tokens whose entropy is at least the quantile 1 - share (arXiv:2506.01939), as in TRL."""
    ordered = entropies[valid].double().sort().values
    if not len(ordered):
        return valid
    at = (1 - share) * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    threshold = ordered[below] + (at - below) * (ordered[above] - ordered[below])
    return valid & (entropies.double() >= threshold)
