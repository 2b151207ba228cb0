"""The results of an evaluation: a table, and every sample as JSON."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_cpp.config.master import EvalConfig, EvalMasterConfig
from nemo_rl_cpp.evals.metrics import Interval, normal_interval, wilson_interval
from nemo_rl_cpp.evals.pages import evaluation_page, page_of, prompts_of
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.report.samples import writable


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        score: mean over prompts of the metric.
        interval: 95 % interval of the score, for prompts drawn from the same source.
        prompts: number of prompts.
        mean_reward: over all responses, as the environment gave it.
        metrics: of rollouts and environment.
    """

    score: float
    interval: Interval
    prompts: int
    mean_reward: float
    seconds: float
    metrics: dict[str, float]


def interval_of_mean(scores: list[float]) -> Interval:
    """95 % interval of the mean of one score a prompt.

    Wilson's where all are 0 or 1; otherwise mean +- 1.96 s / sqrt(P) within [0, 1], with s the scores' spread.
    """
    mean = math.fsum(scores) / len(scores)
    if set(scores) <= {0.0, 1.0} or len(scores) < 2:
        return wilson_interval(mean, len(scores))
    low, high = normal_interval(scores)
    return Interval(max(0.0, low), min(1.0, high))


def metric_name(wanted: "EvalConfig") -> str:
    """pass@4 for pass@k with k_value 4."""
    return wanted.metric.replace("@k", f"@{wanted.k_value}")


def show(result: EvalResult, config: "EvalMasterConfig") -> None:
    """NeMo RL's lines, then the table."""
    from rich.console import Console
    from rich.table import Table

    wanted, generation = config.eval, config.generation
    print(f"model_name={generation.model_name!r} dataset_name={config.data.dataset_name!r}")
    print(
        f"max_new_tokens={generation.max_new_tokens} temperature={generation.temperature} top_p={generation.top_p} "
        f"top_k={generation.top_k} seed={wanted.seed}"
    )
    print(f"metric={metric_name(wanted)} num_tests_per_prompt={wanted.num_tests_per_prompt}")
    print(f"score={result.score:.4f} ({result.score * result.prompts:.1f}/{result.prompts})")
    table = Table(title="Evaluation", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(result, config).items():
        table.add_row(name, value)
    Console().print(table)


def rows(result: EvalResult, config: "EvalMasterConfig") -> dict[str, str]:
    wanted, low_high = config.eval, result.interval
    n, metrics = wanted.num_tests_per_prompt, result.metrics
    table = {
        "model": config.generation.model_name,
        "data": f"{config.data.dataset_name}, {result.prompts} prompts, {n} response{'s' if n > 1 else ''} each",
        metric_name(wanted): f"{result.score:.4f} (95 % interval {low_high.low:.4f} to {low_high.high:.4f})",
        "mean reward": f"{result.mean_reward:.4f}",
        "tokens a response": f"{metrics['mean_gen_tokens_per_sample']:.1f} (longest {metrics['max_gen_tokens_per_sample']})",
        "cut off": f"{100 * metrics['truncation_rate']:.1f} %",
    }
    if wanted.max_rollout_turns > 1:
        table["turns"] = f"{metrics['avg_turns_per_sample']:.2f} (most {metrics['max_turns_per_sample']})"
    own = {name: value for name, value in metrics.items() if name not in _ROLLOUT and isinstance(value, (int, float))}
    table |= {name: f"{value:.4g}" for name, value in own.items()}
    table["time"] = duration(result.seconds)
    if wanted.save_path is not None:
        table["samples"] = f"{page_of(wanted.save_path)}, and all in {Path(wanted.save_path) / 'evaluation_data.json'}"
    return table


_ROLLOUT = {
    "total_turns", "avg_turns_per_sample", "max_turns_per_sample", "natural_termination_rate", "truncation_rate", "max_turns_reached_rate",
    "mean_total_tokens_per_sample", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_env_tokens_per_sample",
}  # fmt: skip


def save_evaluation_data(
    samples: list[dict[str, object]], config: "EvalMasterConfig", folder: Path, result: EvalResult
) -> None:
    """`evaluation_data.json` ({"evaluation_data": [one dictionary a response]}), `config.json` (what they came from) and
    `evaluation.html` (prompts with their answers)."""
    wanted, generation = config.eval, config.generation
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, object] = {"model_name": generation.model_name, "dataset_name": config.data.dataset_name}
    described |= {name: getattr(wanted, name) for name in ("metric", "k_value", "num_tests_per_prompt", "seed")}
    described |= {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
    write_atomic(folder / "config.json", writable(json.dumps(described, indent=2, ensure_ascii=False)) + "\n")
    text = json.dumps({"evaluation_data": samples}, indent=2, ensure_ascii=False, default=str)
    write_atomic(folder / "evaluation_data.json", writable(text) + "\n")
    facts = rows(result, config)
    title = f"{facts.pop('model')}: {metric_name(wanted)} {facts[metric_name(wanted)]}"
    facts.pop("samples", None)
    prompts = prompts_of(samples, wanted.num_tests_per_prompt)
    write_atomic(page_of(folder), writable(evaluation_page(title, facts, prompts)), durable=False)
