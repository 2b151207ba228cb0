"""Runs side by side: what they reached, how long they took, and which keys of their configurations differ."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.files import HYPERPARAMS, METRICS
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.findings_health import STEP_TIME, stage_shares
from nemo_rl_cpp.report.history import MetricHistory, validation_word
from nemo_rl_cpp.report.sections import timing_name
from nemo_rl_cpp.report.shell import duration
from nemo_rl_cpp.report.writer import FACTS

_WHERE_ONLY = ("logger.", "checkpointing.checkpoint_dir")
"""Keys that say where a run writes, and nothing about it."""


class Row(NamedTuple):
    """A line of a comparison: what it is of, and its text for each run."""

    name: str
    values: list[str]


@dataclass
class LoggedRun:
    """A run as its log folder tells it."""

    folder: Path
    name: str
    history: MetricHistory
    config: dict[str, Plain] = field(default_factory=dict)
    facts: dict[str, Plain] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "LoggedRun":
        """ValueError where the folder holds no run."""
        folder = run_folder(folder)
        with open(folder / METRICS, encoding="utf-8", errors="replace") as file:
            rows = list(json_rows(file))
        config = _read(folder / HYPERPARAMS)
        return cls(folder, folder.name, MetricHistory(rows, config), config, _read(folder / FACTS))

    def values(self, name: str) -> list[float]:
        """The finite values of a metric."""
        return self.history.curve(name).finite().values


@dataclass
class Comparison:
    """Runs with names that tell them apart."""

    runs: list[LoggedRun]

    @classmethod
    def of(cls, folders: Sequence[Path | str]) -> "Comparison":
        """Reads the log folders; ValueError for one that holds no run, or that is given twice."""
        runs = [LoggedRun.read(Path(folder)) for folder in folders]
        real = [run.folder.resolve() for run in runs]
        for number, folder in enumerate(real):
            if folder in real[:number]:
                raise ValueError(f"{runs[number].folder} is given twice: compare takes different log folders")
        for run, name in zip(runs, short_names(real), strict=True):
            run.name = name
        return cls(runs)

    @property
    def word(self) -> str:
        """`accuracy` or `reward`, for the validations of all runs."""
        return validation_word(*(run.history for run in self.runs))

    def results(self) -> list[Row]:
        """What the runs reached."""
        rows = [
            Row("title", [str(run.facts.get("title") or "–") for run in self.runs]),
            Row("status", [str(run.facts.get("status") or "–") for run in self.runs]),
            Row("steps", [str(run.history.last_step) for run in self.runs]),
            self._row("train/reward", "reward", lambda v: f"{v[0]:.3f} → {v[-1]:.3f} (best {max(v):.3f})"),
            Row(f"validation {self.word}, last", [_validation(run) for run in self.runs]),
            Row(f"validation {self.word}, best", [_best(run.history) for run in self.runs]),
            self._row("train/mean_gen_tokens_per_sample", "response length, last", lambda v: f"{v[-1]:.1f}"),
            self._row("performance/tokens_per_sec", "tokens a second", lambda v: f"{sum(v) / len(v):,.0f}"),
            self._row(STEP_TIME, "seconds a step", lambda v: f"{sum(v) / len(v):.3g}"),
            self._row(STEP_TIME, "time in steps", lambda v: duration(math.fsum(v)) if math.fsum(v) else "–"),
            self._row("memory/peak_rss_gb/run", "peak memory, GiB", lambda v: f"{max(v):.2f}"),
            self._row("train/token_mult_prob_error", "token_mult_prob_error, most", lambda v: f"{max(v):.9g}"),
            self._row("train/max_logprob_gap", "log-probability gap, most", lambda v: f"{max(v):.3g}"),
        ]
        return [row for row in rows if any(value not in ("", "–") for value in row.values)]

    def _row(self, metric: str, name: str, text: Callable[[list[float]], str]) -> Row:
        """What a metric's values of each run come to; a dash where a run has none."""
        every = [run.values(metric) for run in self.runs]
        return Row(name, [text(values) if values else "–" for values in every])

    def timings(self) -> list[tuple[str, list[float]]]:
        """(stage, its seconds a step in each run), the longest first; stages below half a percent of every run are left out."""
        labels: dict[str, list[float]] = {}
        for run in self.runs:
            for label, share in stage_shares(run.history).items():
                if share >= 0.005:
                    labels.setdefault(label, [])
        for label, means in labels.items():
            for run in self.runs:
                steps = len(run.values(STEP_TIME))
                means.append(run.history.total(timing_name(run.history, label)) / steps if steps else 0.0)
        return sorted(labels.items(), key=lambda item: -max(item[1]))

    def differing_keys(self) -> list[Row]:
        """Keys of the configurations whose values differ, but for those that say where a run writes."""
        flat = [flatten_dict(run.config, expand_lists=False) for run in self.runs]
        if not all(flat):
            return []
        keys = sorted({key for one in flat for key in one})
        return [
            Row(key, [_text(one[key]) if key in one else "–" for one in flat])
            for key in keys
            if not key.startswith(_WHERE_ONLY) and any(one.get(key) != flat[0].get(key) for one in flat)
        ]

    def no_keys(self) -> str:
        """Why `differing_keys` is empty, for a reader."""
        without = [run.name for run in self.runs if not run.config]
        if not without:
            return "No key of their configurations differs."
        names = f"{', '.join(without[:-1])} and {without[-1]}" if len(without) > 1 else without[0]
        have = "have" if len(without) > 1 else "has"
        return f"Their configurations cannot be compared: {names} {have} no {HYPERPARAMS} in the log folder that can be read."

    def verdict(self) -> str:
        """Which of the first two runs validates better, and whether the validations tell them apart; where their last ones are of
        different steps, the last step that both have, too."""
        return self._last_validations() + self._common_validation()

    def _common_validation(self) -> str:
        first, second = (
            dict(zip(*run.history.curve("validation/accuracy").finite(), strict=True)) for run in self.runs[:2]
        )
        common = max(first.keys() & second.keys(), default=0)
        if common == 0 or max(first) == max(second):
            return ""
        names = [run.name for run in self.runs]
        return f" At step {common}, the last that both have: {names[0]} {first[common]:.3f}, {names[1]} {second[common]:.3f}."

    def _last_validations(self) -> str:
        first, second = self.runs[:2]
        ends = [_end(run) for run in (first, second)]
        if None in ends:
            return ""
        a, b = ends
        step = "" if a.step == b.step else f" (after steps {a.step} and {b.step})"
        if a.low is None or b.low is None:
            return f"Validation {self.word}: {first.name} {a.mean:.3f}, {second.name} {b.mean:.3f}{step}."
        low, high = newcombe(b, a)
        name, other = (second.name, first.name) if b.mean >= a.mean else (first.name, second.name)
        gap = abs(b.mean - a.mean)
        if low <= 0 <= high:
            return (
                f"The validations do not tell {first.name} and {second.name} apart: {self.word} {a.mean:.3f} and {b.mean:.3f}{step}, "
                f"difference {b.mean - a.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})."
            )
        inside = (low, high) if b.mean >= a.mean else (-high, -low)
        return f"{name} validates better than {other} by {gap:.3f} (95 % interval {inside[0]:.3f} to {inside[1]:.3f}){step}."


class Validated(NamedTuple):
    """The last validation of a run, with its 95 % interval where it has one."""

    step: int
    mean: float
    low: float | None
    high: float | None


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


def short_names(folders: Sequence[Path]) -> list[str]:
    """The fewest last parts of the folders' paths that tell all of them apart; of numbered ones in several places the place, too."""
    places = {folder.parent for folder in folders}
    least = 2 if len(places) > 1 and any(folder.name.startswith("exp_") for folder in folders) else 1
    for count in range(least, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-count:]).lstrip("/") for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _end(run: LoggedRun) -> Validated | None:
    means = run.history.curve("validation/accuracy").finite()
    if not means.values:
        return None
    step = means.steps[-1]
    bounds = [
        dict(zip(*run.history.curve(f"validation/accuracy_ci95_{end}").finite(), strict=True)).get(step)
        for end in ("low", "high")
    ]
    return Validated(step, means.values[-1], *bounds)


def _validation(run: LoggedRun) -> str:
    end = _end(run)
    if end is None:
        return "–"
    interval = f" ({end.low:.3f} to {end.high:.3f})" if end.low is not None and end.high is not None else ""
    return f"{end.mean:.3f}{interval}, step {end.step}"


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
