"""The metrics of a run as series over steps, and the curves that a page shows of them."""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain

MAX_POINTS = 400


def format_number(value: float) -> str:
    """A short text for an axis or a tile: 4 significant digits, k/M/G for large numbers."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def downsample(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most about `limit` points that still show every spike: the lowest and the highest of each stretch."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    keep: set[int] = {0, len(xs) - 1}
    size = len(xs) / (limit / 2)
    for bucket in range(limit // 2):
        members = [i for i in range(int(bucket * size), min(int((bucket + 1) * size), len(xs))) if math.isfinite(ys[i])]
        if members:
            keep |= {min(members, key=ys.__getitem__), max(members, key=ys.__getitem__)}
    order = sorted(keep)
    return [xs[i] for i in order], [ys[i] for i in order]


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
        node: object = self.settings
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

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
    """Return `accuracy` where every reward of every validation was 0 or 1, which `validation/right_or_wrong` says, else `reward`."""
    said = [value for history in histories for value in history.curve("validation/right_or_wrong").finite().values]
    return "accuracy" if all(value == 1 for value in said) else "reward"


MOST_POINTS = 500


def packed(data: Plain) -> str:
    """Plain data as gzipped JSON in base64: a text without any character that HTML knows. A lone surrogate, which UTF-8 does not
    have, becomes a question mark."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def metric_data(runs: Mapping[str, MetricHistory]) -> dict[str, Plain]:
    """{"runs": [{"name", "axes": [steps], "metrics": {name: entry}}]}.

    An entry is [axis, values], where `axis` numbers the steps' list and one number stands for a constant; behind them come [axis, means]
    where a long curve was thinned to the lowest and highest value of each stretch. A text is the name of a metric with the same
    values. What is not finite is null.
    """
    return {"runs": [_run(name, history) for name, history in runs.items()]}


def _run(name: str, history: MetricHistory) -> dict[str, Plain]:
    axes: list[list[float]] = []
    numbers: dict[tuple[float, ...], int] = {}
    seen: dict[tuple[tuple[int, ...], tuple[float, ...]], str] = {}
    metrics: dict[str, Plain] = {}

    def axis(steps: Sequence[float]) -> int:
        key = tuple(steps)
        if key not in numbers:
            numbers[key] = len(axes)
            axes.append(list(steps))
        return numbers[key]

    for metric in history.names():
        curve = history.curve(metric)
        same = (tuple(curve.steps), tuple(curve.values))
        if same in seen:
            metrics[metric] = seen[same]
            continue
        seen[same] = metric
        if len(set(curve.values)) == 1 and curve.values[0] - curve.values[0] == 0:
            steps = curve.steps if len(curve.steps) <= MOST_POINTS else downsample(*curve, MOST_POINTS)[0]
            metrics[metric] = [axis(steps), _short(curve.values[0])]
        elif len(curve.steps) <= MOST_POINTS:
            metrics[metric] = [axis(curve.steps), [_short(value) for value in curve.values]]
        else:
            steps, values = downsample(*curve, MOST_POINTS)
            middles, means = _means(curve)
            metrics[metric] = [axis(steps), [_short(v) for v in values], axis(middles), [_short(v) for v in means]]
    return {"name": name, "axes": [*axes], "metrics": metrics}


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """The means of stretches of a long curve, each at its last step."""
    steps, values = curve.finite()
    size = len(values) / (MOST_POINTS // 2)
    if size <= 1:
        return [*steps], values
    cuts = [round(number * size) for number in range(MOST_POINTS // 2 + 1)]
    pairs = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    return [steps[b - 1] for _, b in pairs], [sum(values[a:b]) / (b - a) for a, b in pairs]


def _short(value: float) -> float | int | None:
    """Six significant digits; a whole number without its point."""
    if value - value != 0:
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


class Line(NamedTuple):
    """A metric in a panel. `low` and `high` are the metrics that bound its interval, drawn as a band."""

    label: str
    metric: str
    low: str | None = None
    high: str | None = None


class Panel(NamedTuple):
    """A chart: its title, unit and lines. `zero`: the axis begins at 0; `smooth`: a running mean over a faint line."""

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False
    smooth: bool = False
    wide: bool = False

    def spec(self) -> dict[str, Plain]:
        """What chart.js draws."""
        lines = [{k: v for k, v in line._asdict().items() if v is not None} for line in self.lines]
        return {"title": self.title, "zero": self.zero, "smooth": self.smooth, "lines": [*lines]}


class Panels(NamedTuple):
    """The panels of a run: those that move, and those whose every line has one value throughout."""

    moving: list[Panel]
    flat: list[Panel]


_LOW, _HIGH = "validation/accuracy_ci95_low", "validation/accuracy_ci95_high"
_PANELS = (
    Panel("Reward", "", [Line("reward", "train/reward")], smooth=True, wide=True),
    Panel("Validation", "", [Line("", "validation/accuracy", _LOW, _HIGH), Line("pass@k", "validation/pass_k")]),
    Panel("Loss", "", [Line("loss", "train/loss")], smooth=True),
    Panel("Gradient norm", "", [Line("grad_norm", "train/grad_norm")], zero=True, smooth=True),
    Panel("Entropy", "nats per token", [Line("approx_entropy", "train/approx_entropy")], zero=True),
    Panel(
        "Response length",
        "tokens",
        [Line("mean", "train/mean_gen_tokens_per_sample"), Line("longest", "train/max_gen_tokens_per_sample")],
        zero=True,
    ),
    Panel("Cut off at the length limit", "share", [Line("truncation_rate", "train/truncation_rate")], zero=True),
    Panel(
        "Groups with equal rewards",
        "%",
        [
            Line("all", "train/groups/pct_equal"),
            Line("best", "train/groups/pct_equal_best"),
            Line("worst", "train/groups/pct_equal_worst"),
        ],
        zero=True,
    ),
    Panel("KL to the reference", "per token", [Line("kl_penalty", "train/kl_penalty")]),
    Panel(
        "Probability ratio",
        "",
        [
            Line("mean", "train/probs_ratio"),
            Line("lowest", "train/probs_ratio_min"),
            Line("highest", "train/probs_ratio_max"),
        ],
    ),
    Panel("Learning rate", "", [Line("lr", "train/lr")], zero=True),
    Panel(
        "Speed",
        "tokens per second",
        [Line("whole step", "performance/tokens_per_sec"), Line("generation", "performance/generation_tokens_per_sec")],
        zero=True,
    ),
    Panel("token_mult_prob_error", "1 is exact", [Line("token_mult_prob_error", "train/token_mult_prob_error")]),
    Panel("Value loss", "", [Line("critic/loss", "train/critic/loss")], zero=True),
    Panel("Explained variance", "of the value model", [Line("explained_var", "train/critic/explained_var")]),
    Panel("Memory after each step", "GiB", [Line("rss", "memory/rss_gb")], zero=True),
)


def panels_of(histories: Sequence[MetricHistory]) -> Panels:
    """The panels that any of the runs has values for. A panel is flat when every line of it has one value in all runs."""
    result = Panels([], [])
    for panel in _PANELS:
        lines = [line for line in panel.lines if any(h.curve(line.metric).finite().values for h in histories)]
        if not lines:
            continue
        if panel.title == "Validation":
            word = validation_word(*histories)
            lines = [line._replace(label=line.label or word) for line in lines]
            panel = panel._replace(title=f"Validation {word}")
        is_flat = all(_is_flat([h.curve(line.metric).finite().values for h in histories]) for line in lines)
        (result.flat if is_flat else result.moving).append(panel._replace(lines=lines))
    return result


def _is_flat(curves: Sequence[Sequence[float]]) -> bool:
    values = [value for curve in curves for value in curve]
    return len(set(values)) <= 1 and max(map(len, curves)) > 1
