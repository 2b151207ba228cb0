"""Throughput of a training step, printed and returned under NeMo RL's names."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_cpp.algorithms.utils import setting
from nemo_rl_cpp.config.master import MasterConfig
from nemo_rl_cpp.telemetry.performance import ONE_DEVICE, Devices, performance_metrics


def print_performance_metrics(
    train_results: dict[str, float],
    metrics: dict[str, Any],
    timing_metrics: dict[str, float],
    master_config: Any,
    *,
    num_prompts_per_step: int,
    num_generations_per_prompt: int,
    is_async_rl: bool,
) -> dict[str, float]:
    """Rates of one step: samples and tokens a second, whole, by phase and by device.

    metrics: `total_num_tokens`; optional `per_worker_token_counts` (removed from it, since it is no number) and
    `mean_total_tokens_per_sample`. timing_metrics, in seconds: `total_step_time`, `policy_training`,
    `policy_and_reference_logprobs`, `generation` or `exposed_generation`, and `weight_sync` or
    `prepare_for_generation/total`. train_results: optional `total_flops`, `num_ranks`, `theoretical_tflops`. A phase
    that took no time is left out.
    """
    print("\nPerformance Metrics:")
    found: dict[str, float] = {}
    _worker_balance(metrics, found)
    if "mean_total_tokens_per_sample" in metrics:
        print(f"  mean tokens a sample: {metrics['mean_total_tokens_per_sample']:.2f}")
    devices = _devices(master_config)
    training = timing_metrics["policy_training"]
    logprobs = timing_metrics.get("policy_and_reference_logprobs", 0.0)
    generation = timing_metrics.get("generation")
    if generation is None:  # training and generation overlap: what is hidden behind training counts as generation too
        generation = timing_metrics["exposed_generation"] + logprobs + training
    if is_async_rl and not _colocated(master_config):
        found["training_worker_idle_time_ratio"] = _idle_ratio(timing_metrics, training, logprobs)
    total, tokens = timing_metrics["total_step_time"], metrics["total_num_tokens"]
    samples = num_prompts_per_step * num_generations_per_prompt
    found |= performance_metrics(
        {
            **timing_metrics,
            "generation": generation,
            "policy_and_reference_logprobs": logprobs,
            "total_step_time": total,
        },
        num_samples=samples,
        total_num_tokens=tokens,
        devices=devices,
    )
    print("  Throughputs (per GPU), and of the whole run:")
    for name, value in found.items():
        print(f"    {name}: {value:.2f}")
    _flops(train_results, training, found)
    return found


def _devices(config: Any) -> Devices:
    """One for a loaded configuration, whose sizes are folded; those of a plain mapping as they stand."""
    if isinstance(config, MasterConfig):
        return ONE_DEVICE
    cluster = setting(config, "cluster")
    total = max(1, int(setting(cluster, "num_nodes", 1)) * int(setting(cluster, "gpus_per_node", 1)))
    if _colocated(config):
        return Devices(total, total, total)
    resources = setting(_colocation(config), "resources", {})
    generation = int(setting(resources, "gpus_per_node", None) or 1) * int(setting(resources, "num_nodes", None) or 1)
    return Devices(total, max(1, total - generation), generation)


def _colocation(config: Any) -> Any:
    return setting(setting(setting(config, "policy"), "generation"), "colocated", {})


def _colocated(config: Any) -> bool:
    return bool(setting(_colocation(config), "enabled", True))


def _idle_ratio(timing: Mapping[str, float], training: float, logprobs: float) -> float:
    exposed = timing["exposed_generation"]
    refit = timing.get("weight_sync", timing.get("prepare_for_generation/total", 0.0))
    return 0.0 if exposed > 0.1 else exposed / (training + logprobs + exposed + refit)


def _worker_balance(metrics: dict[str, Any], found: dict[str, float]) -> None:
    """How unevenly the generation workers were loaded: 1 - mean load / largest load."""
    counts = metrics.pop("per_worker_token_counts", None)
    if isinstance(counts, list):
        merged: dict[int, float] = {}
        for part in counts:
            for worker, count in part.items():
                merged[worker] = merged.get(worker, 0) + count
        counts = merged
    if not isinstance(counts, Mapping) or not counts or max(counts.values()) == 0:
        return
    largest = max(counts.values())
    for worker, count in sorted(counts.items()):
        bar = int(20 * count / largest)
        print(f"  worker {worker:3d}: {'■' * bar}{'□' * (20 - bar)} {count / 1000:.1f}K tokens")
    found["average_token_imbalance"] = 1 - sum(counts.values()) / largest / len(counts)
    print(f"  Average Token Imbalance: {100 * found['average_token_imbalance']:.2f}%")


def _flops(train_results: Mapping[str, Any], training: float, found: dict[str, float]) -> None:
    if "total_flops" not in train_results or training <= 0:
        return
    tflops = train_results["total_flops"] / training / 1e12
    found["train_flops_per_gpu"] = tflops / train_results["num_ranks"]
    if "theoretical_tflops" in train_results:
        found["train_fp_utilization"] = tflops / train_results["theoretical_tflops"]
        print(f"  Training Model Floating Point Utilization: {100 * found['train_fp_utilization']:.2f}%")
    print(f"  Training FLOPS: {tflops:.2f} TFLOPS ({found['train_flops_per_gpu']:.2f} a rank)")
