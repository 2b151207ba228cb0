"""Compare runs or evaluations side by side: tables in the terminal, and for runs the report page with all of them."""

import io
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_cpp.files.durable import json_object
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.folders import HYPERPARAMS, METRICS
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.history import MetricHistory, validation_word
from nemo_rl_cpp.report.page import FACTS, Rows, render_side_by_side, text_of, tiles
from nemo_rl_cpp.report.samples import printable

_WHERE_ONLY = ("logger.", "checkpointing.checkpoint_dir")  # keys that say where a run writes and nothing else


@dataclass
class Comparison:
    """A comparison of several runs or evaluations: tables, a verdict and examples."""

    names: list[str]  # short distinct names, in the order in which the runs or evaluations were given
    tables: dict[str, Rows]
    verdict: list[str]  # sentences on which one is better, or that the difference may be chance
    histories: Sequence[MetricHistory] = ()  # of runs
    examples: Sequence[str] = field(default_factory=list)  # additional lines

    def page(self) -> str:
        return render_side_by_side(dict(zip(self.names, self.histories)), self.tables, self.verdict)

    def print(self) -> None:
        shown = io.StringIO()
        console = Console(file=shown, highlight=False, width=shutil.get_terminal_size().columns)
        for title, rows in self.tables.items():
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column(title.lower(), no_wrap=True)
            for name in self.names:
                table.add_column(Text(printable(name)), overflow="fold")
            for name, values in rows.items():
                table.add_row(*(Text(printable(cell)) for cell in (name, *values)))
            if rows:
                console.print(table, "")
        for line in (*map(str.rstrip, shown.getvalue().splitlines()), *self.verdict, *self.examples):
            print(line)


def different_folders(folders: Sequence[Path | str]) -> list[str]:
    """Return the path of each folder relative to their common folder. Raise ValueError if a folder is given twice."""
    real = [Path(folder).resolve() for folder in folders]
    for number, folder in enumerate(real):
        if folder in real[:number]:
            raise ValueError(f"{folders[number]} is given twice: compare takes different folders")
    top = os.path.commonpath([folder.parent for folder in real])
    return [folder.relative_to(top).as_posix() for folder in real]


def side_by_side(columns: Sequence[dict[str, str]]) -> Rows:
    """Return the mappings `columns` as a table: a row for each key of any of them, one cell per mapping."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, "–") for column in columns] for key in keys}


def differing_keys(configs: Sequence[dict[str, Plain]], ignored: tuple[str, ...] = ()) -> Rows:
    """Return a table row for each key whose value differs between `configs`, except keys that begin with an entry of
    `ignored`."""
    flat = [flatten_dict(config, expand_lists=False) for config in configs]
    rows = side_by_side([{key: text_of(value) for key, value in sorted(one.items())} for one in flat])
    return {key: row for key, row in sorted(rows.items()) if len(set(row)) > 1 and not key.startswith(ignored)}


def run_folder(folder: Path) -> Path:
    """Return the folder of a run's logs: `folder` if it has metrics, otherwise its newest subfolder exp_NNN with
    metrics. Raise ValueError if neither has."""
    if (folder / METRICS).is_file():
        return folder
    inside = [path for path in folder.glob("exp_*") if (path / METRICS).is_file() and path.name[4:].isdigit()]
    if not inside:
        raise ValueError(f"{folder} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    return max(inside, key=lambda path: int(path.name[4:]))


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Compare the results, curves and keys of runs. Raise ValueError if a folder has no run or is given twice."""
    found = [run_folder(Path(folder)) for folder in folders]
    names, configs = different_folders(found), [json_object(folder / HYPERPARAMS) for folder in found]
    histories = [MetricHistory.of_file(folder / METRICS, config) for folder, config in zip(found, configs)]
    columns = []
    for folder, history in zip(found, histories):
        facts = json_object(folder / FACTS)
        column = {name: str(facts[name]) for name in ("title", "status") if facts.get(name)}
        numbers = tiles(history, facts.get("total_steps"))
        columns.append(column | {name: f"{value} ({note})" if note else value for name, value, note in numbers})
    verdict = [compare_validations(names, histories)]
    without = [name for name, config in zip(names, configs) if not config]
    if without:
        verdict.append(f"Keys are not compared: {', '.join(without)} has no {HYPERPARAMS} that can be read.")
    keys = {} if without else differing_keys(configs, _WHERE_ONLY)
    tables = {"Side by side": side_by_side(columns), "Keys that differ": keys}
    return Comparison(names, tables, [*filter(None, verdict)], histories=histories)


def compare_validations(names: Sequence[str], histories: Sequence[MetricHistory]) -> str:
    """Return a sentence on which of the first two runs has the better validation at the last common step, or that the
    difference may be chance; "" without such a step."""
    metric = "validation/accuracy"
    (one, other), (a, b) = names[:2], (history.by_step(metric) for history in histories[:2])
    step = max(a.keys() & b.keys(), default=None)
    if step is None:
        return ""
    word, gap = validation_word(*histories), b[step] - a[step]
    at = f"at step {step}" + ("" if max(a) == max(b) else ", the last that both have")
    bounds = [
        [history.by_step(f"{metric}_ci95_{end}").get(step) for end in ("low", "high")] for history in histories[:2]
    ]
    if None in bounds[0] + bounds[1]:
        return f"Validation {word} {at}: {one} {a[step]:.3f}, {other} {b[step]:.3f}."
    low, high = newcombe((b[step], *bounds[1]), (a[step], *bounds[0]))
    if low <= 0 <= high:
        return (
            f"The validations do not tell {one} and {other} apart {at}: {word} {a[step]:.3f} and {b[step]:.3f}, "
            f"difference {gap:+.3f} (95 % interval {low:+.3f} to {high:+.3f})."
        )
    if gap < 0:
        one, other, gap, low, high = other, one, -gap, -high, -low
    return f"{other} validates better than {one} {at}, by {gap:.3f} (95 % interval {low:.3f} to {high:.3f})."


def newcombe(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the difference d = a - b of two proportions (Newcombe's hybrid score),
    each given with the bounds of its own interval, (p, low, high):

    d - sqrt((a - a_low)^2 + (b_high - b)^2),  d + sqrt((a_high - a)^2 + (b - b_low)^2)"""
    gap = a[0] - b[0]
    return gap - math.hypot(a[0] - a[1], b[2] - b[0]), gap + math.hypot(a[2] - a[0], b[0] - b[1])
