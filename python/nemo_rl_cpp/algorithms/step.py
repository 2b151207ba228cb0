"""Stages of a training step that GRPO and PPO share: shaped rewards, masked samples, what is reported."""

from typing import Any

import torch

from nemo_rl_cpp.algorithms.components import TrainingComponents
from nemo_rl_cpp.algorithms.observe import StepReport
from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping
from nemo_rl_cpp.algorithms.reward_scaling import scale_rewards
from nemo_rl_cpp.algorithms.seq_logprob_error import compute_and_apply_seq_logprob_error_masking
from nemo_rl_cpp.algorithms.step_metrics import baseline_metrics, batch_metrics, rollout_table
from nemo_rl_cpp.algorithms.utils import calculate_baseline_and_std_per_prompt


def shape_rewards(rollouts: Any, loop: Any) -> Any:
    """`reward_scaling`, then `reward_shaping`. `loop`: the section `grpo` or `ppo`."""
    return apply_reward_shaping(scale_rewards(rollouts, loop.reward_scaling), loop.reward_shaping, quiet=True)


def valid_mask(batch: Any) -> torch.Tensor:
    """[B, S]: 1 on the tokens that are trained."""
    return batch["token_mask"] * batch["sample_mask"][:, None]


class NothingToTrainOnError(RuntimeError):
    """A batch without a single token to train on."""


def require_valid_tokens(samples: Any, batch: Any, section: str) -> None:
    """Raises NothingToTrainOnError where every token is masked: an optimizer step would only shrink the weights."""
    if bool(valid_mask(batch).any()):
        return
    cut = int(samples["truncated"].sum())
    raise NothingToTrainOnError(
        f"no token is left to train on: all {len(batch['sample_mask'])} samples of this step are masked, {cut} of them were cut off; raise "
        f"policy.generation.max_new_tokens, or look at {section}.overlong_filtering, {section}.seq_logprob_error_threshold and the prompts' lengths"
    )


def mask_by_logprob_error(batch: Any, threshold: float | None) -> dict[str, float]:
    """Drops sequences by `seq_logprob_error_threshold`; nothing to measure where generation is the training forward."""
    if "prev_logprobs" not in batch:
        return {}
    metrics = compute_and_apply_seq_logprob_error_masking(batch, batch["rewards"], threshold)
    return metrics | {"num_masked_seqs_by_logprob_error": metrics["num_masked_seqs"]}


def report_step(parts: TrainingComponents, loop: Any, samples: Any, batch: Any, metrics: dict[str, Any]) -> StepReport:
    """Everything that is logged of a step but its times. `loop`: the section `grpo` or `ppo`."""
    rewards, groups = batch["rewards"], batch["group_id"][:, None]
    leave_one_out = getattr(loop, "use_leave_one_out_baseline", True)
    baseline, _ = calculate_baseline_and_std_per_prompt(
        groups, rewards, torch.ones_like(rewards), leave_one_out_baseline=leave_one_out
    )
    rollout_metrics = parts.rollouts.pop_metrics()
    metrics = metrics | rollout_metrics | batch_metrics(samples, batch) | baseline_metrics(baseline)
    metrics |= parts.sampler.metrics | parts.advantage_estimator.last_metrics
    trained = (batch["token_mask"] != 0) & (batch["sample_mask"] != 0)[:, None]
    histograms = {"baseline_reward": baseline.tolist()}
    histograms |= {name: batch[name][trained].tolist() for name in ("advantages", "values", "returns") if name in batch}
    return StepReport(
        metrics=metrics,
        table=rollout_table(samples, batch),
        histograms=histograms,
        generated_tokens=rollout_metrics.get("total_generated_tokens"),
        rollout_names=frozenset(rollout_metrics),
    )
