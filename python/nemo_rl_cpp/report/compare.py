"""Runs, or evaluations, side by side: one table for the terminal and one page, whichever they are."""

import io
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.files import HYPERPARAMS, METRICS
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.history import MetricHistory, metric_data, panels_of, validation_word
from nemo_rl_cpp.report.page import (
    STEP_TIME,
    PageSection,
    curves_section,
    document,
    duration,
    parts,
    stage_shares,
    timing_name,
)
from nemo_rl_cpp.report.samples import printable, writable
from nemo_rl_cpp.report.writer import FACTS

_WHERE_ONLY = ("logger.", "checkpointing.checkpoint_dir")
"""Keys that say where a run writes, and nothing about it."""
_COLORS = 9  # as many as chart.js has


class Row(NamedTuple):
    """A line of a comparison: its name, and the text of each run."""

    name: str
    values: list[str]


class Block(NamedTuple):
    """A part of a comparison: a table, which terminal and page show, or HTML for the page alone."""

    key: str
    title: str
    rows: Sequence[Row] = ()
    html: Callable[[], str] | None = None


@dataclass
class Comparison:
    """What terminal and page show of several runs or evaluations.

    Attributes:
        what: "runs" or "evaluations".
        names: short ones that tell them apart, in the order in which they were given.
        titles: the title of each run, or the model of each evaluation.
        verdict: sentences that say which is better, or that it may be chance.
        blocks: the parts, in the order of the page.
        histories: metrics, by name, that the page's charts show; {}: none.
        examples: further lines for the terminal.
    """

    what: str
    names: list[str]
    titles: list[str]
    verdict: str
    blocks: list[Block]
    histories: dict[str, MetricHistory] = field(default_factory=dict)
    examples: Sequence[str] = ()

    def page(self, now: float | None = None) -> str:
        """Return the page as HTML. `now`: Unix time that it says it was written at."""
        sections = [
            PageSection(
                b.key, b.title, parts().side_by_side(self.names, b.rows, _COLORS) if b.html is None else b.html()
            )
            for b in self.blocks
            if b.rows or b.html is not None
        ]
        data: dict[str, Plain] = {}
        if self.histories:
            panels = panels_of(list(self.histories.values()))
            specs: list[Plain] = [panel.spec() for panel in (*panels.moving, *panels.flat)]
            data["data-metrics"] = metric_data(self.histories) | {"panels": specs}
        title = f"comparison of {len(self.names)} {self.what}"
        header = parts().compared(title, list(zip(self.names, self.titles)), self.verdict, _COLORS)
        scripts = {} if self.histories else {"scripts": ()}
        return writable(document(title, header, sections, data, now=now, **scripts))

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = io.StringIO()
        console = Console(file=shown, highlight=False, width=shutil.get_terminal_size().columns)
        for block in self.blocks:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
            table.add_column(block.title.lower(), no_wrap=True)
            for name in self.names:
                table.add_column(Text(printable(name)), overflow="fold")
            for row in block.rows:
                table.add_row(*(Text(printable(cell)) for cell in (row.name, *row.values)))
            if block.rows:
                console.print(table, "")
        tables = map(str.rstrip, shown.getvalue().splitlines())
        for line in (*tables, self.verdict, *self.examples):
            print(line)


def different_folders(folders: Sequence[Path | str]) -> list[str]:
    """Return a name for each folder, its path below what all have in common; ValueError for one that is given twice."""
    real = [Path(folder).resolve() for folder in folders]
    for number, folder in enumerate(real):
        if folder in real[:number]:
            raise ValueError(f"{folders[number]} is given twice: compare takes different folders")
    top = os.path.commonpath([folder.parent for folder in real])
    return [folder.relative_to(top).as_posix() for folder in real]


def differing_keys(configs: Sequence[dict[str, Plain]], ignored: tuple[str, ...] = ()) -> list[Row]:
    """Return the keys of configurations whose values differ, but for those that begin with one of `ignored`."""
    flat = [flatten_dict(config, expand_lists=False) for config in configs]
    keys = sorted({key for one in flat for key in one})
    return [
        Row(key, [_text(one[key]) if key in one else "–" for one in flat])
        for key in keys
        if not key.startswith(ignored) and any(one.get(key) != flat[0].get(key) for one in flat)
    ]


# ---- runs


@dataclass
class LoggedRun:
    """A run, read from its log folder."""

    history: MetricHistory
    config: dict[str, Plain] = field(default_factory=dict)
    facts: dict[str, Plain] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "LoggedRun":
        with open(folder / METRICS, encoding="utf-8", errors="replace") as file:
            rows = list(json_rows(file))
        config = _read(folder / HYPERPARAMS)
        return cls(MetricHistory(rows, config), config, _read(folder / FACTS))

    def values(self, name: str) -> list[float]:
        return self.history.curve(name).finite().values


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Compare the runs of log folders: results, curves, keys that differ, timings.

    ValueError for a folder that holds no run, or that is given twice.
    """
    found = [run_folder(Path(folder)) for folder in folders]
    names, runs = different_folders(found), [LoggedRun.read(folder) for folder in found]
    histories = [run.history for run in runs]
    panels = panels_of(histories)
    without = [name for name, run in zip(names, runs) if not run.config]
    verdict = [
        _validations(names, histories),
        f"Keys are not compared: {', '.join(without)} has no {HYPERPARAMS} that can be read." if without else "",
    ]
    blocks = [
        Block("results", "Side by side", _results(runs)),
        Block("curves", "Curves", html=lambda: curves_section(panels.moving, panels.flat, histories)),
        Block("keys", "Keys that differ", [] if without else differing_keys([run.config for run in runs], _WHERE_ONLY)),
        Block("time", "Seconds a step, by stage", _timings(runs)),
        Block("metrics", "All metrics", html=lambda: parts().metrics()),
    ]
    titles = [str(run.facts.get("title") or "") for run in runs]
    return Comparison("runs", names, titles, "\n".join(filter(None, verdict)), blocks, dict(zip(names, histories)))


def _results(runs: Sequence[LoggedRun]) -> list[Row]:
    """Return the rows of what the runs reached."""

    def row(metric: str, name: str, text: Callable[[list[float]], str]) -> Row:
        every = [run.values(metric) for run in runs]
        return Row(name, [text(values) if values else "–" for values in every])

    word = validation_word(*(run.history for run in runs))
    rows = [
        Row("title", [str(run.facts.get("title") or "–") for run in runs]),
        Row("status", [str(run.facts.get("status") or "–") for run in runs]),
        Row("steps", [str(run.history.last_step) for run in runs]),
        row("train/reward", "reward", lambda v: f"{v[0]:.3f} → {v[-1]:.3f} (best {max(v):.3f})"),
        Row(f"validation {word}, last", [_validation(run.history) for run in runs]),
        Row(f"validation {word}, best", [_best(run.history) for run in runs]),
        row("train/mean_gen_tokens_per_sample", "response length, last", lambda v: f"{v[-1]:.1f}"),
        row("performance/tokens_per_sec", "tokens a second", lambda v: f"{sum(v) / len(v):,.0f}"),
        row(STEP_TIME, "seconds a step", lambda v: f"{sum(v) / len(v):.3g}"),
        row(STEP_TIME, "time in steps", lambda v: duration(math.fsum(v)) if math.fsum(v) else "–"),
        row("memory/peak_rss_gb/run", "peak memory, GiB", lambda v: f"{max(v):.2f}"),
        row("train/token_mult_prob_error", "token_mult_prob_error, most", lambda v: f"{max(v):.9g}"),
        row("train/max_logprob_gap", "log-probability gap, most", lambda v: f"{max(v):.3g}"),
    ]
    return [row for row in rows if any(value not in ("", "–") for value in row.values)]


def _timings(runs: Sequence[LoggedRun]) -> list[Row]:
    """Return each stage's seconds a step, the longest first; stages below half a percent of every run are left out."""
    labels = dict.fromkeys(
        label for run in runs for label, share in stage_shares(run.history).items() if share >= 0.005
    )
    means = {
        label: [run.history.total(timing_name(run.history, label)) / max(len(run.values(STEP_TIME)), 1) for run in runs]
        for label in labels
    }
    return [
        Row(label, [f"{seconds:.3g}" for seconds in means[label]])
        for label in sorted(means, key=lambda at: -max(means[at]))
    ]


class Validated(NamedTuple):
    """A validation of a run: its mean, with its 95 % interval where it has one."""

    mean: float
    low: float | None
    high: float | None


def _validations(names: Sequence[str], histories: Sequence[MetricHistory]) -> str:
    """Say which of the first two runs validates better at the last step that both have, and whether that may be chance."""
    first, second = (_validated(history) for history in histories[:2])
    step = max(first.keys() & second.keys(), default=None)
    if step is None:
        return ""
    (one, other), word, (a, b) = names[:2], validation_word(*histories), (first[step], second[step])
    last = "" if max(first) == max(second) else ", the last that both have"
    if a.low is None or b.low is None:
        return f"Validation {word} at step {step}{last}: {one} {a.mean:.3f}, {other} {b.mean:.3f}."
    low, high = newcombe(b, a)
    if low <= 0 <= high:
        return (
            f"The validations do not tell {one} and {other} apart at step {step}{last}: {word} {a.mean:.3f} and {b.mean:.3f}, "
            f"difference {b.mean - a.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})."
        )
    if b.mean < a.mean:
        one, other, low, high = other, one, -high, -low
    return f"{other} validates better than {one} at step {step}{last}, by {abs(b.mean - a.mean):.3f} (95 % interval {low:.3f} to {high:.3f})."


def newcombe(a: Validated, b: Validated) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares, a - b, from Wilson's interval of each (Newcombe's hybrid score):

    d - sqrt((a - a_low)^2 + (b_high - b)^2),  d + sqrt((a_high - a)^2 + (b - b_low)^2)
    """
    assert a.low is not None and a.high is not None and b.low is not None and b.high is not None
    gap = a.mean - b.mean
    return gap - math.hypot(a.mean - a.low, b.high - b.mean), gap + math.hypot(a.high - a.mean, b.mean - b.low)


def run_folder(folder: Path) -> Path:
    """The log folder itself, or the newest exp_NNN in it; ValueError where neither has metrics."""
    if (folder / METRICS).is_file():
        return folder
    inside = sorted(
        (path for path in folder.glob("exp_*") if (path / METRICS).is_file() and path.name[4:].isdigit()),
        key=lambda path: int(path.name[4:]),
    )
    if not inside:
        raise ValueError(f"{folder} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    return inside[-1]


def _validated(history: MetricHistory) -> dict[float, Validated]:
    """Return the validations of a run, by their steps."""
    low, high = (
        dict(zip(*history.curve(f"validation/accuracy_ci95_{end}").finite(), strict=True)) for end in ("low", "high")
    )
    means = history.curve("validation/accuracy").finite()
    return {
        step: Validated(mean, low.get(step), high.get(step))
        for step, mean in zip(means.steps, means.values, strict=True)
    }


def _validation(history: MetricHistory) -> str:
    validations = _validated(history)
    if not validations:
        return "–"
    step, end = list(validations.items())[-1]
    interval = f" ({end.low:.3f} to {end.high:.3f})" if end.low is not None and end.high is not None else ""
    return f"{end.mean:.3f}{interval}, step {step}"


def _best(history: MetricHistory) -> str:
    curve = history.curve("validation/accuracy").finite()
    if not curve.values:
        return "–"
    best = max(curve.values)
    return f"{best:.3f}, step {curve.steps[curve.values.index(best)]}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)


def _read(path: Path) -> dict[str, Plain]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
