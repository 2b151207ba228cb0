"""The metrics of a run as series over steps, read from metrics.jsonl."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import as_number, cfg_get
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain


class Curve(NamedTuple):
    """The values of one metric over its steps, in step order; values may be nan or infinite."""

    steps: list[int]
    values: list[float]

    def finite(self) -> "Curve":
        """Only the finite values."""
        pairs = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        return Curve([s for s, _ in pairs], [v for _, v in pairs])


class Trend(NamedTuple):
    """Means of the first and of the last stretch of a curve, and how many standard errors lie between them."""

    first: float
    last: float
    sigmas: float
    stretch: int


class MetricHistory:
    """All numeric metrics of a run. A metric that was logged twice at a step keeps the later value.

    `settings`: the run's configuration as a plain mapping, which advice may need; empty where it is not known.
    """

    def __init__(self, rows: Iterable[Mapping[str, object]] = (), settings: Mapping[str, object] | None = None) -> None:
        self.settings = settings or {}
        self._data: dict[str, dict[int, float]] = {}
        self._sorted: dict[str, Curve] = {}
        for row in rows:
            self.add(row)

    @classmethod
    def of(cls, **metrics: Iterable[float]) -> "MetricHistory":
        """A history from lists of values at steps 1, 2, ...; `__` in a name stands for `/`. For tests and notebooks."""
        history = cls()
        for name, values in metrics.items():
            for step, value in enumerate(values, start=1):
                history.add({"step": step, name.replace("__", "/"): value})
        return history

    def add(self, row: Mapping[str, object]) -> None:
        """Takes in one row of metrics.jsonl."""
        step = row.get("step")
        if not isinstance(step, int):
            return
        for name, value in row.items():
            if name != "step" and (number := as_number(value)) is not None:
                self._data.setdefault(name, {})[step] = number
                self._sorted.pop(name, None)

    def total(self, *names: str) -> float:
        """The sum of all finite values of these metrics."""
        return math.fsum(value for name in names for value in self.curve(name).finite().values)

    def setting(self, key: str, default: object = None) -> object:
        """A dotted key of the configuration."""
        return cfg_get(self.settings, key, default)

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin with `prefix`, sorted."""
        return sorted(name for name in self._data if name.startswith(prefix))

    def curve(self, *names: str) -> Curve:
        """The first of the names that has values; an empty curve when none has."""
        for name in names:
            if name in self._data:
                if name not in self._sorted:
                    points = sorted(self._data[name].items())
                    self._sorted[name] = Curve([s for s, _ in points], [v for _, v in points])
                return self._sorted[name]
        return Curve([], [])

    def recent(self, *names: str, count: int = 10) -> float | None:
        """The mean of the last `count` finite values; None when there are none."""
        values = self.curve(*names).finite().values[-count:]
        return math.fsum(values) / len(values) if values else None

    def trend(self, *names: str, at_least: int = 6) -> Trend | None:
        """How the curve moved from its first to its last stretch (a sixth of it each); None with fewer values."""
        values = self.curve(*names).finite().values
        if len(values) < at_least:
            return None
        stretch = max(2, min(20, round(len(values) / 6)))
        head, tail = values[:stretch], values[-stretch:]
        first, last = math.fsum(head) / stretch, math.fsum(tail) / stretch
        # steps differ from their neighbours by noise alone: half their mean square is its variance
        noise = math.fsum((b - a) ** 2 for a, b in zip(values, values[1:], strict=False)) / (2 * (len(values) - 1))
        error = math.sqrt(2 * noise / stretch)
        sigmas = (
            (last - first) / error if error > 0 else math.copysign(math.inf, last - first) if last != first else 0.0
        )
        return Trend(first, last, sigmas, stretch)

    @property
    def last_step(self) -> int:
        """The highest step of any metric; 0 when there are none."""
        return max((max(points) for points in self._data.values()), default=0)


class JsonlTail:
    """Reads a growing JSON-lines file: each call of `new_rows` gives the whole lines that came since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode: int | None = None

    def new_rows(self) -> tuple[list[dict[str, Plain]], bool]:
        """(rows, whether the file was replaced or cut, so that everything read before is void)."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return [], False
        restarted = self._inode is not None and (facts.st_ino != self._inode or facts.st_size < self._offset)
        if restarted:
            self._offset = 0
        self._inode = facts.st_ino
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(json_rows(whole.splitlines())), restarted


def validation_word(*histories: MetricHistory) -> str:
    """`accuracy` where every reward of every validation was 0 or 1, else `reward`.

    A validation says so itself (`validation/right_or_wrong`). Logs of older runs do not: there a mean that is no whole number of
    right answers, or that differs from the environment's share of exactly right ones, is a reward.
    """
    return "accuracy" if all(_right_or_wrong(history) for history in histories) else "reward"


def _right_or_wrong(history: MetricHistory) -> bool:
    said = history.curve("validation/right_or_wrong").finite().values
    if said:
        return all(value == 1 for value in said)
    means, exact = (
        dict(zip(*history.curve(f"validation/{name}").finite(), strict=True)) for name in ("accuracy", "exactly_right")
    )
    if any(not 0 <= mean <= 1 or abs(exact.get(step, mean) - mean) > 1e-5 for step, mean in means.items()):
        return False
    if history.curve("validation/pass_k").values:  # several answers a prompt, whose number is not logged
        return True
    counts = dict(zip(*history.curve("validation/num_samples").finite(), strict=True))
    return all(
        abs(mean * counts[step] - round(mean * counts[step])) < 1e-3 for step, mean in means.items() if step in counts
    )
