"""The results of evaluations: pass@k and cons@k of n responses with confidence intervals, and their comparison."""

import json
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from nemo_rl_cpp.config.master import EvalConfig, EvalMasterConfig
from nemo_rl_cpp.files.durable import writable, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.compare import Comparison, different_folders, differing_keys
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.report.samples import printable


def pass_at_k(num_tests: int, num_correct: int, k: int) -> float:
    """Return an unbiased estimate of pass@k if c = `num_correct` of n = `num_tests` responses are correct: 1 -
    C(n - c, k) / C(n, k) (Chen et al., "Evaluating Large Language Models Trained on Code", 2021)."""
    subsets = math.comb(num_tests, k)
    return (subsets - math.comb(num_tests - num_correct, k)) / subsets


def cons_at_k(rewards: Sequence[float], answers: Sequence[Hashable], k: int) -> float:
    """Return cons@k: the share of all k-subsets of the responses whose majority answer (in a tie the one that comes
    first in the subset; None is an answer) has, at its first response in the subset, reward 1.

    The subsets are not enumerated. Instead, count those that an answer wins with v votes, the first from response i:
    every other answer has fewer than v votes, or v votes that all come after i."""
    places: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        places.setdefault(answer, []).append(i)
    good = 0
    for answer, own in places.items():
        others = [place for other, place in places.items() if other != answer]
        for rank, first in enumerate(own):
            if rewards[first] != 1:
                continue
            later = len(own) - rank - 1
            for votes in range(1, min(k, later + 1) + 1):
                good += math.comb(later, votes - 1) * _ways(others, votes, first, k - votes)
    return good / math.comb(len(answers), k)


def _ways(others: list[list[int]], votes: int, first: int, remaining: int) -> int:
    """Return in how many ways `remaining` votes can go to the answers `others` (the indices of each answer's responses)
    so that each of them loses against an answer with `votes` votes, whose first response has the index `first`."""
    ways = [1] + [0] * remaining  # ways[m]: the number of ways in which m votes go to the answers so far
    for place in others:
        after = sum(i > first for i in place)
        each = [math.comb(len(place), w) for w in range(votes)] + [math.comb(after, votes)]
        ways = [sum(ways[m - w] * each[w] for w in range(min(m, votes) + 1)) for m in range(remaining + 1)]
    return ways[remaining]


class Interval(NamedTuple):
    low: float
    high: float


_Z = 1.959963984540054  # 95 % of a normal distribution lie within this many standard deviations


def normal_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of n >= 2 values: mean +- 1.96 s / sqrt(n), s the standard deviation."""
    mean, half = math.fsum(values) / len(values), _Z * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def wilson_interval(share: float, count: int) -> Interval:
    """Return the 95 % confidence interval of the proportion p = `share` observed in n = `count` trials (Wilson, 1927),
    with z = 1.96:

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)"""
    center = share + _Z * _Z / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z * _Z / (4 * count * count))
    scale = 1 + _Z * _Z / count
    return Interval(max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale))


DATA = "evaluation_data.json"
_EXAMPLES = 3  # prompts shown in the terminal; evaluation_data.json contains all


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation."""

    score: float  # mean of the metric over prompts
    interval: Interval  # 95 % confidence interval of the score, for prompts drawn from the same source
    prompts: int  # number of prompts
    mean_reward: float  # mean of the environment's rewards over all responses
    seconds: float
    metrics: dict[str, float]  # metrics of the rollouts and the environment


def interval_of_mean(scores: list[float]) -> Interval:
    """Return the 95 % interval of the mean of n prompts' scores: Wilson's interval if all are 0 or 1, otherwise mean +-
    1.96 s / sqrt(n), clipped to [0, 1], with s the standard deviation."""
    if set(scores) <= {0.0, 1.0} or len(scores) < 2:
        return wilson_interval(math.fsum(scores) / len(scores), len(scores))
    low, high = normal_interval(scores)
    return Interval(max(0.0, low), min(1.0, high))


def metric_name(wanted: EvalConfig) -> str:
    return wanted.metric.replace("@k", f"@{wanted.k_value}")


def _data_name(config: EvalMasterConfig) -> str | None:
    """Return the file or Hub data set of an evaluation, otherwise the name of its data set."""
    return getattr(config.data, "data_path", None) or config.data.dataset_name


def show(result: EvalResult, samples: Sequence[Mapping[str, Any]], config: EvalMasterConfig) -> None:
    """Print the lines that NeMo RL's evaluation prints, a table of the results, and some wrong responses."""
    wanted, generation = config.eval, config.generation
    print(f"model_name={generation.model_name!r} dataset_name={_data_name(config)!r}")
    print(
        f"max_new_tokens={generation.max_new_tokens} temperature={generation.temperature} top_p={generation.top_p} "
        f"top_k={generation.top_k} seed={wanted.seed}"
    )
    print(f"metric={metric_name(wanted)} num_tests_per_prompt={wanted.num_tests_per_prompt}")
    print(f"score={result.score:.4f} ({result.score * result.prompts:.1f}/{result.prompts})")
    table = Table(title="Evaluation", title_justify="left", show_header=False)
    table.add_column(style="bold")
    for name, value in _rows(result, config).items():
        table.add_row(name, value)
    if wanted.save_path is not None:
        table.add_row("samples", str(Path(wanted.save_path) / DATA))
    Console().print(table)
    for sample in [sample for sample in samples if sample["reward"] <= 0][:_EXAMPLES]:
        print(f"wrong: {_short(sample['prompt'])}\n  {_short(sample['response'])}")


def _rows(result: EvalResult, config: EvalMasterConfig) -> dict[str, str]:
    wanted, (low, high), metrics = config.eval, result.interval, result.metrics
    n = wanted.num_tests_per_prompt
    rows = {
        "model": config.generation.model_name,
        "data": f"{_data_name(config)}, {result.prompts} prompts, {n} response{'s' if n > 1 else ''} each",
        metric_name(wanted): f"{result.score:.4f} (95 % interval {low:.4f} to {high:.4f})",
        "mean reward": f"{result.mean_reward:.4f}",
        "tokens a response": f"{metrics['mean_gen_tokens_per_sample']:.1f} (longest {metrics['max_gen_tokens_per_sample']})",
        "cut off": f"{100 * metrics['truncation_rate']:.1f} %",
    }
    if wanted.max_rollout_turns > 1:
        rows["turns"] = f"{metrics['avg_turns_per_sample']:.2f} (most {metrics['max_turns_per_sample']})"
    for name, value in metrics.items():
        if name not in _ROLLOUT and isinstance(value, (int, float)):
            rows[name] = f"{value:.4g}"
    return rows | {"time": duration(result.seconds)}


_ROLLOUT = {
    "total_turns", "avg_turns_per_sample", "max_turns_per_sample", "natural_termination_rate", "truncation_rate", "max_turns_reached_rate",
    "total_generated_tokens", "mean_total_tokens_per_sample", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_env_tokens_per_sample",
}  # fmt: skip
"""Metrics of rollouts that the table of results shows under other names, or omits."""


def save_evaluation_data(samples: list[dict[str, object]], config: EvalMasterConfig, folder: Path) -> None:
    """Write `evaluation_data.json` (a dictionary per response) and `config.json`, the settings, into `folder`."""
    wanted, generation = config.eval, config.generation
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, object] = {"model_name": generation.model_name, "dataset_name": _data_name(config)}
    described |= {name: getattr(wanted, name) for name in ("metric", "k_value", "num_tests_per_prompt", "seed")}
    described |= {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
    described["repeat"] = config.data.repeat
    write_atomic(folder / "config.json", writable(json.dumps(described, indent=2, ensure_ascii=False)) + "\n")
    text = json.dumps({"evaluation_data": samples}, indent=2, ensure_ascii=False, default=str)
    write_atomic(folder / DATA, writable(text) + "\n")


# ---- evaluations side by side


class Prompt(NamedTuple):
    """A prompt of an evaluation, with the mean reward of its responses and the first response."""

    text: str
    mean: float
    response: str


def prompts_of(samples: Sequence[Mapping[str, object]], n: int) -> list[Prompt]:
    """Return the prompts of an evaluation, given its samples. Every `n` consecutive samples belong to one prompt."""
    prompts = []
    for start in range(0, len(samples), n):
        rewards = [float(str(sample["reward"])) for sample in samples[start : start + n]]
        text, response = (str(samples[start][name]) for name in ("prompt", "response"))
        prompts.append(Prompt(text, math.fsum(rewards) / len(rewards), response))
    return prompts


def is_evaluation(folder: Path | str) -> bool:
    """Return whether the folder contains the samples of an evaluation (`eval.save_path`)."""
    return (Path(folder) / DATA).is_file()


def compare_evaluations(folders: Sequence[Path | str]) -> Comparison:
    """Compare evaluations on the same prompts: mean rewards, differing keys, and prompts whose reward changed from the
    first to the last. Raise ValueError if a folder cannot be read, is given twice, or has different prompts."""
    names = different_folders(folders)
    configs, prompts = zip(*(_read(Path(folder)) for folder in folders))
    for folder, other in zip(folders, prompts):
        if [prompt.text for prompt in other] != [prompt.text for prompt in prompts[0]]:
            raise ValueError(
                f"{folders[0]} and {folder} have other prompts ({len(prompts[0])} and {len(other)}): compare evaluations "
                "of the same data, with the same seed and prompt template"
            )
    tables = {
        "Side by side": {
            "model": [str(config["model_name"]) for config in configs],
            "mean reward": [f"{_mean(each):.4f}" for each in prompts],
        },
        "Keys that differ": differing_keys(configs, ("model_name",)),
    }
    examples, answered = [], list(zip(*prompts))
    changed = {"worse": _changed(answered, -1), "better": _changed(answered, 1)}
    for word, found in changed.items():
        for answers in found[:_EXAMPLES]:
            examples.append(f"\n{word}, {answers[0].mean:.3g} -> {answers[-1].mean:.3g}: {_short(answers[0].text)}")
            examples += [f"  {name}: {_short(answer.response)}" for name, answer in zip(names, answers)]
    verdict = [f"{name}: {difference(prompts[0], other)}" for name, other in zip(names[1:], prompts[1:])]
    better, worse = len(changed["better"]), len(changed["worse"])
    counts = f"{better} are better, {worse} worse, {len(prompts[0]) - better - worse} equal"
    verdict.append(f"of {len(prompts[0])} prompts {counts} in {names[-1]} against {names[0]}")
    return Comparison(names, tables, verdict, examples=examples)


def difference(first: Sequence[Prompt], second: Sequence[Prompt]) -> str:
    """Return as text how much the mean reward differs, with the 95 % interval over paired prompts."""
    gaps = [b.mean - a.mean for a, b in zip(first, second, strict=True)]
    text = f"mean reward {_mean(first):.4f} -> {_mean(second):.4f}, difference {statistics.fmean(gaps):+.4f}"
    if len(gaps) < 2:
        return text
    low, high = normal_interval(gaps)
    return f"{text}, 95 % interval {low:+.4f} to {high:+.4f}{' (may be chance)' if low <= 0 <= high else ''}"


def _mean(prompts: Sequence[Prompt]) -> float:
    return statistics.fmean(prompt.mean for prompt in prompts)


def _changed(answers: Sequence[Sequence[Prompt]], sign: int) -> list[Sequence[Prompt]]:
    """Return the prompts whose mean reward rose (`sign` 1) or fell (-1) from first to last, largest change first."""
    found = [each for each in answers if sign * (each[-1].mean - each[0].mean) > 0]
    return sorted(found, key=lambda each: -abs(each[-1].mean - each[0].mean))


def _read(folder: Path) -> tuple[dict[str, Plain], list[Prompt]]:
    """Return the settings and the prompts of an evaluation. A prompt that `data.repeat` repeats is one prompt."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        samples = json.loads((folder / DATA).read_text(encoding="utf-8"))["evaluation_data"]
        prompts = prompts_of(samples, int(config["num_tests_per_prompt"]))
        rows = len(prompts) // int(config.get("repeat", 1))
        merged = [prompts[row]._replace(mean=_mean(prompts[row::rows])) for row in range(rows)]
        return {"model_name": "", **config}, merged
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{folder} is no folder of an evaluation ({why}): give folders that eval.save_path has named"
        ) from None


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 110 else f"{line[:70]} ... {line[-30:]}"
