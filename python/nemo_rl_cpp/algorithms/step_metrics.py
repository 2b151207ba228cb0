"""The metrics of a training step, under NeMo RL's names."""

import math
from collections.abc import Mapping

import torch

from nemo_rl_cpp.metrics import extremum
from nemo_rl_cpp.models.interfaces import TrainingResult
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch

Metrics = dict[str, float | str | None | list[float]]
"""Metric name -> value. A list is a histogram, a string is a digest, and None means that it was not requested."""

_MEANS = {
    "lr", "wd", "reward", "filtered_reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length", "grad_norm",
}  # fmt: skip


def aggregate_microbatch_metrics(all_mb_metrics: Mapping[str, list[float]]) -> dict[str, float]:
    """Return one value per metric from its values over micro-batches (see `collect_metrics`).

    Losses and fractions of tokens are already divided by global counts, so they are summed. Minima and maxima ignore
    infinities and are -1.0 if no other value is left, as in NeMo RL. `lr`, `wd` and counts of the global batch are
    averaged over global batches. Micro-batches without a valid sample (`num_valid_samples` 0) are ignored.

    If the policy also returns `token_mult_prob_error_sum`, the numerators of `token_mult_prob_error`, this metric is
    the mean over global batches of (sum of the numerators) / (number of tokens). It is then exactly 1.0 if trainer and
    generator agree in every token."""
    valid = all_mb_metrics.get("num_valid_samples")
    result = {}
    for name, values in all_mb_metrics.items():
        kept = [float(v) for i, v in enumerate(values) if valid is None or len(valid) != len(values) or valid[i] > 0]
        if pick := extremum(name):
            finite = [v for v in kept if abs(v) != float("inf")]
            result[name] = pick(finite) if finite else -1.0
        elif name in _MEANS:
            kept = kept or [float(v) for v in values]
            result[name] = sum(kept) / len(kept) if kept else 0.0
        elif name == "token_mult_prob_error":
            result[name] = math.fsum(kept)
        elif name != "token_mult_prob_error_sum":
            result[name] = float(f"{math.fsum(kept):.13g}")  # so that shares of one whole add up to 1
    sums, tokens = all_mb_metrics.get("token_mult_prob_error_sum"), all_mb_metrics.get("global_valid_toks")
    if sums and tokens and len(sums) == len(tokens):
        result["token_mult_prob_error"] = _mean_of_tokens(sums, tokens)
    return result


def _mean_of_tokens(sums: list[float], tokens: list[float]) -> float:
    """Return the mean of sums[b] / tokens[b] over the batches b with tokens. The sums of batches with equally many
    tokens are added before the division, for exactness."""
    total: dict[float, list[float]] = {}
    for value, count in zip(sums, tokens):
        if count > 0:
            total.setdefault(count, []).append(value)
    number = sum(map(len, total.values()))
    return math.fsum(math.fsum(values) / count for count, values in total.items()) / max(number, 1)


def training_metrics(result: TrainingResult) -> dict[str, float]:
    """Return the metrics of one `policy.train` call. `loss` is the sum over micro-batches, as in NeMo RL.
    `max_logprob_gap` and `logprob_mismatched_tokens` compare generation with the first training forward pass."""
    metrics = {"loss": float(result["loss"].mean()), "grad_norm": float(result["grad_norm"].mean())}
    metrics |= aggregate_microbatch_metrics(result["all_mb_metrics"])
    exactness = result.get("exactness")
    if exactness is not None:
        metrics["max_logprob_gap"] = exactness.max_gap
        metrics["logprob_mismatched_tokens"] = exactness.mismatched_tokens
    return metrics


def mean_over_epochs(*models: list[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of several epochs on one batch. Each argument lists the metrics of one model, a dictionary per
    epoch. Return means over the epochs, but minima of the metrics `..._min` and maxima of the metrics `..._max`. If
    there are several epochs, add the metrics of the last one under `last_epoch/`."""
    result, trained = {}, [epochs for epochs in models if any(epochs)]
    for epochs in trained:
        result |= _means(epochs)
    if any(len(epochs) > 1 for epochs in trained):
        for epochs in trained:
            result |= {f"last_epoch/{name}": value for name, value in epochs[-1].items()}
    return result


def _means(epochs: list[dict[str, float]]) -> dict[str, float]:
    if len(epochs) == 1:
        return epochs[0]
    result = {}
    for name in dict.fromkeys(name for metrics in epochs for name in metrics):
        values = [metrics[name] for metrics in epochs if name in metrics]
        pick = extremum(name)
        result[name] = pick(values) if pick else sum(values) / len(values)
    return result


def batch_metrics(samples: Rollouts, batch: TrainBatch) -> dict[str, float]:
    """Return metrics of rewards, lengths, masked samples, and the advantages of trained tokens."""
    advantages = batch.advantages[batch.is_valid]
    metrics = {
        "reward": float(batch.rewards.mean()),
        "mean_prompt_length": float(torch.as_tensor(samples.length).float().mean()),
        "total_num_tokens": int(batch.input_lengths.sum()),
        "num_masked_samples": int((batch.sample_mask == 0).sum()),
    }
    for name, reduce in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.max), ("min", torch.min)):
        metrics[f"advantages/{name}"] = float(reduce(advantages)) if len(advantages) else 0.0
    if cut := float((torch.as_tensor(samples.loss_multiplier) == 0).float().mean()):
        metrics["cut_prompts_rate"] = cut  # prompts longer than data.max_input_seq_length
    truncated = torch.as_tensor(samples.truncated).bool()
    if truncated.any():
        metrics["reward_of_truncated"] = float(batch.rewards[truncated].mean())
    if "mask_sample" in samples:
        metrics["num_mask_sample_filtered"] = int(torch.as_tensor(samples["mask_sample"]).sum())
    return metrics


_OF_ROLLOUTS = {
    "reward", "accuracy", "zero_std_groups", "reward_of_truncated", "approx_entropy", "gen_kl_error", "policy_kl_error",
    "js_divergence_error", "sampling_importance_ratio", "stale_samples", "token_mult_prob_error", "total_rollout_tokens",
}  # fmt: skip
_PREFIXES_OF_ROLLOUTS = ("baseline_reward/", "advantages/", "groups/", "probs_ratio")


def without_rollouts(metrics: Metrics) -> Metrics:
    """Return `metrics` without those that are computed from rewards, advantages and sampled tokens."""
    kept = metrics.keys() - _OF_ROLLOUTS
    return {name: v for name, v in metrics.items() if name in kept and not name.startswith(_PREFIXES_OF_ROLLOUTS)}


def baseline_metrics(baseline: torch.Tensor) -> dict[str, float]:
    """Return the percentages of samples whose reward baseline (`baseline` [B]) is exactly 0, exactly 1, and neither."""
    zero, one = (100.0 * float((baseline == value).float().mean()) for value in (0, 1))
    shares = {"pct_0": zero, "pct_1": one, "pct_mixed": 100.0 - zero - one}
    return {f"baseline_reward/{name}": share for name, share in shares.items()}


def rollout_table(samples: Rollouts, batch: TrainBatch) -> dict[str, list[object]]:
    """Return the columns of train_data_step<N>.jsonl: column name -> list with one entry per sample."""
    lengths = batch.input_lengths.tolist()
    table: dict[str, list[object]] = {
        "content": [[{key: m[key] for key in ("role", "content")} for m in log] for log in samples.message_log],
        "rewards": batch.rewards.tolist(),
        "input_lengths": lengths,
        "sample_loss_mask": batch.sample_mask.tolist(),
        "truncated": torch.as_tensor(samples.truncated).tolist(),
    }
    columns = {
        "token_ids": "input_ids", "token_loss_mask": "token_mask", "advantages": "advantages",
        "generation_logprobs": "generation_logprobs", "prev_logprobs": "prev_logprobs", "values": "values", "returns": "returns",
    }  # fmt: skip
    for name, key in columns.items():
        if key in batch:
            table[name] = [row.tolist() for row in batch.rows(batch.tokens[key])]
    parts = [key for key in samples.keys() if str(key).startswith("reward/")]
    for key in ("group_id", *parts):
        if key in samples:
            table[key] = torch.as_tensor(samples[key]).tolist()
    return table | truths(samples)


def truths(samples: Rollouts) -> dict[str, list[object]]:
    """Return {"ground_truth": one entry per sample}, a column of a rollout file; {} if no prompt has a ground truth."""
    found = [(info or {}).get("ground_truth") for info in samples.get("extra_env_info") or ()]
    shown = [truth if truth is None or isinstance(truth, (str, int, float)) else str(truth) for truth in found]
    return {"ground_truth": shown} if any(truth is not None for truth in shown) else {}
