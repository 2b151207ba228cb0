"""Compares runs or evaluations side by side, as tables in the terminal and as a page."""

import io
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_cpp.files.durable import json_object
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.folders import HYPERPARAMS, METRICS
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report import page
from nemo_rl_cpp.report.history import MetricHistory, metric_data, panels_of, read_metrics, validation_word
from nemo_rl_cpp.report.samples import printable, writable

_WHERE_ONLY = ("logger.", "checkpointing.checkpoint_dir")  # keys that say where a run writes and nothing else
_COLORS = 9  # the number of colors in chart.js


class Row(NamedTuple):
    """A row of a comparison table: its name, and one text per run."""

    name: str
    values: list[str]


class Block(NamedTuple):
    """A part of a comparison: a table for the terminal and the page, or HTML for the page only."""

    key: str
    title: str
    rows: Sequence[Row] = ()
    html: Callable[[], str] | None = None


@dataclass
class Comparison:
    """A comparison of several runs or evaluations, for the terminal and for a page."""

    what: str  # "runs" or "evaluations"
    names: list[str]  # short distinct names, in the order in which the runs or evaluations were given
    titles: list[str]  # the title of each run, or the model of each evaluation
    verdict: str  # sentences on which one is better, or that the difference may be chance
    blocks: list[Block]  # the parts, in the order of the page
    # metric histories by name, for the page's charts; empty for no charts
    histories: dict[str, MetricHistory] = field(default_factory=dict)
    examples: Sequence[str] = ()  # additional lines for the terminal

    def page(self) -> str:
        """Return the page as HTML."""
        sections = []
        for block in self.blocks:
            table = page.parts().side_by_side(self.names, block.rows, _COLORS) if block.rows else ""
            sections.append(page.PageSection(block.key, block.title, block.html() if block.html is not None else table))
        data: dict[str, Plain] = {}
        if self.histories:
            specs = [panel.spec() for panel in panels_of(list(self.histories.values()))]
            data["data-metrics"] = metric_data(self.histories) | {"panels": specs}
        title = f"comparison of {len(self.names)} {self.what}"
        header = page.parts().compared(title, list(zip(self.names, self.titles)), self.verdict, _COLORS)
        return writable(page.document(title, header, sections, data, has_scripts=bool(self.histories)))

    def print(self) -> None:
        """Print the tables, the verdict and the examples."""
        shown = io.StringIO()
        console = Console(file=shown, highlight=False, width=shutil.get_terminal_size().columns)
        for block in self.blocks:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column(block.title.lower(), no_wrap=True)
            for name in self.names:
                table.add_column(Text(printable(name)), overflow="fold")
            for row in block.rows:
                table.add_row(*(Text(printable(cell)) for cell in (row.name, *row.values)))
            if block.rows:
                console.print(table, "")
        for line in (*map(str.rstrip, shown.getvalue().splitlines()), self.verdict, *self.examples):
            print(line)


def different_folders(folders: Sequence[Path | str]) -> list[str]:
    """Return the path of each folder relative to their common folder. Raise ValueError if a folder is given twice."""
    real = [Path(folder).resolve() for folder in folders]
    for number, folder in enumerate(real):
        if folder in real[:number]:
            raise ValueError(f"{folders[number]} is given twice: compare takes different folders")
    top = os.path.commonpath([folder.parent for folder in real])
    return [folder.relative_to(top).as_posix() for folder in real]


def differing_keys(configs: Sequence[dict[str, Plain]], ignored: tuple[str, ...] = ()) -> list[Row]:
    """Return a row for each key whose value differs, except keys that begin with one of `ignored`."""
    flat = [flatten_dict(config, expand_lists=False) for config in configs]
    keys = sorted({key for one in flat for key in one if not key.startswith(ignored)})
    rows = [Row(key, [page.text_of(one[key]) if key in one else "–" for one in flat]) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


# ---- runs


@dataclass
class LoggedRun:
    """The metrics, configuration and report facts of a run, read from its log folder."""

    history: MetricHistory
    config: dict[str, Plain] = field(default_factory=dict)
    facts: dict[str, Plain] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "LoggedRun":
        config = json_object(folder / HYPERPARAMS)
        return cls(MetricHistory(read_metrics(folder / METRICS), config), config, json_object(folder / page.FACTS))


def run_folder(folder: Path) -> Path:
    """Return `folder`, or its newest exp_NNN with metrics. Raise ValueError if there are none."""
    if (folder / METRICS).is_file():
        return folder
    inside = [path for path in folder.glob("exp_*") if (path / METRICS).is_file() and path.name[4:].isdigit()]
    if not inside:
        raise ValueError(f"{folder} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    return max(inside, key=lambda path: int(path.name[4:]))


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Compare runs: results, curves, keys, times. Raise ValueError if a folder has no run or is given twice."""
    found = [run_folder(Path(folder)) for folder in folders]
    names, runs = different_folders(found), [LoggedRun.read(folder) for folder in found]
    histories = [run.history for run in runs]
    without = [name for name, run in zip(names, runs) if not run.config]
    verdict = [_compare_validations(names, histories)]
    if without:
        verdict.append(f"Keys are not compared: {', '.join(without)} has no {HYPERPARAMS} that can be read.")
    keys = [] if without else differing_keys([run.config for run in runs], _WHERE_ONLY)
    blocks = [
        Block("results", "Side by side", _results(runs)),
        Block("curves", "Curves", html=lambda: page.curves_section(panels_of(histories), histories)),
        Block("keys", "Keys that differ", keys),
        Block("time", "Seconds a step, by stage", _timings(runs)),
        Block("metrics", "All metrics", html=lambda: page.parts().metrics()),
    ]
    titles = [str(run.facts.get("title") or "") for run in runs]
    return Comparison("runs", names, titles, "\n".join(filter(None, verdict)), blocks, dict(zip(names, histories)))


def _results(runs: Sequence[LoggedRun]) -> list[Row]:
    """Return the rows with the last and the best values of the runs' metrics."""

    def row(metric: str, name: str, text: Callable[[list[float]], str]) -> Row:
        every = [run.history.values(metric) for run in runs]
        return Row(name, [text(values) if values else "–" for values in every])

    word = validation_word(*(run.history for run in runs))
    rows = [
        Row("title", [str(run.facts.get("title") or "–") for run in runs]),
        Row("status", [str(run.facts.get("status") or "–") for run in runs]),
        Row("steps", [str(run.history.last_step) for run in runs]),
        row("train/reward", "reward", lambda v: f"{v[0]:.3f} → {v[-1]:.3f} (best {max(v):.3f})"),
        Row(f"validation {word}, last", [_last_validation(run.history) for run in runs]),
        row("validation/accuracy", f"validation {word}, best", lambda v: f"{max(v):.3f}"),
        row("train/mean_gen_tokens_per_sample", "response length, last", lambda v: f"{v[-1]:.1f}"),
        row("performance/tokens_per_sec", "tokens a second", lambda v: f"{sum(v) / len(v):,.0f}"),
        row(page.STEP_TIME, "seconds a step", lambda v: f"{sum(v) / len(v):.3g}"),
        row(page.STEP_TIME, "time in steps", lambda v: page.duration(math.fsum(v))),
        row("memory/peak_rss_gb/run", "peak memory, GiB", lambda v: f"{max(v):.2f}"),
        row("train/token_mult_prob_error", "token_mult_prob_error, most", lambda v: f"{max(v):.9g}"),
        row("train/max_logprob_gap", "log-probability gap, most", lambda v: f"{max(v):.3g}"),
    ]
    return [row for row in rows if set(row.values) != {"–"}]


def _timings(runs: Sequence[LoggedRun]) -> list[Row]:
    """Return a row for each stage of the training loop with its seconds per step, longest first. Stages that take less
    than half a percent of the time in every run are omitted."""
    labels = {label for run in runs for label, share in page.stage_shares(run.history).items() if share >= 0.005}
    means = {
        label: [
            run.history.total(page.timing_name(run.history, label)) / max(len(run.history.values(page.STEP_TIME)), 1)
            for run in runs
        ]
        for label in sorted(labels)
    }
    ordered = sorted(means, key=lambda label: -max(means[label]))
    return [Row(label, [f"{seconds:.3g}" for seconds in means[label]]) for label in ordered]


# ---- validations of runs


class Validated(NamedTuple):
    """The result of a validation: the mean, and its 95 % interval if known."""

    mean: float
    low: float | None
    high: float | None


def _validations(history: MetricHistory) -> dict[int, Validated]:
    """Return the validations of a run, by step."""
    name = "validation/accuracy"
    low, high = (history.by_step(f"{name}_ci95_{end}") for end in ("low", "high"))
    return {step: Validated(mean, low.get(step), high.get(step)) for step, mean in history.by_step(name).items()}


def _last_validation(history: MetricHistory) -> str:
    validations = _validations(history)
    if not validations:
        return "–"
    step, (mean, low, high) = list(validations.items())[-1]
    return f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else "") + f", step {step}"


def _compare_validations(names: Sequence[str], histories: Sequence[MetricHistory]) -> str:
    """Return a sentence on which of the first two runs has the better validation at the last step that both validated,
    or that the difference may be chance. Return "" if there is no such step."""
    first, second = (_validations(history) for history in histories[:2])
    step = max(first.keys() & second.keys(), default=None)
    if step is None:
        return ""
    (one, other), word, (a, b) = names[:2], validation_word(*histories), (first[step], second[step])
    at = f"at step {step}" + ("" if max(first) == max(second) else ", the last that both have")
    if a.low is None or b.low is None:
        return f"Validation {word} {at}: {one} {a.mean:.3f}, {other} {b.mean:.3f}."
    low, high = newcombe(b, a)
    if low <= 0 <= high:
        return (
            f"The validations do not tell {one} and {other} apart {at}: {word} {a.mean:.3f} and {b.mean:.3f}, "
            f"difference {b.mean - a.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})."
        )
    if b.mean < a.mean:
        one, other, low, high = other, one, -high, -low
    gap = f"by {abs(b.mean - a.mean):.3f} (95 % interval {low:.3f} to {high:.3f})"
    return f"{other} validates better than {one} {at}, {gap}."


def newcombe(a: Validated, b: Validated) -> tuple[float, float]:
    """Return the 95 % confidence interval of the difference d = a - b of two proportions (Newcombe's hybrid score):

    d - sqrt((a - a_low)^2 + (b_high - b)^2),  d + sqrt((a_high - a)^2 + (b - b_low)^2)"""
    gap = a.mean - b.mean
    return gap - math.hypot(a.mean - a.low, b.high - b.mean), gap + math.hypot(a.high - a.mean, b.mean - b.low)
