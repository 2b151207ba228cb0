"""The metrics of a run as series over steps, and the charts drawn from them."""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain

MOST_POINTS = 500


def format_number(value: float) -> str:
    """Return a number as short text: 4 significant digits, with k, M or G for large numbers."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


class Curve(NamedTuple):
    """The values of one metric in step order. Values may be NaN or infinite."""

    steps: list[int]
    values: list[float]

    def finite(self) -> "Curve":
        pairs = [(step, value) for step, value in zip(self.steps, self.values) if math.isfinite(value)]
        return Curve([step for step, _ in pairs], [value for _, value in pairs])


class Trend(NamedTuple):
    """The means `first` and `last` of the first and the last `stretch` values of a curve, and `sigmas`, the difference
    between these means in standard errors."""

    first: float
    last: float
    sigmas: float
    stretch: int


class MetricHistory:
    """All numeric metrics of a run, by name and step. A second value at the same step replaces the first. `settings` is
    the run's configuration, which the advice of findings may need; empty if unknown."""

    def __init__(self, rows: Iterable[Mapping[str, object]] = (), settings: Mapping[str, object] | None = None) -> None:
        self.settings = settings or {}
        self._data: dict[str, dict[int, float]] = {}
        self._sorted: dict[str, Curve] = {}
        for row in rows:
            self.add(row)

    @classmethod
    def of_file(cls, path: Path, settings: Mapping[str, object]) -> "MetricHistory":
        """Return the metrics in the complete lines of a metrics.jsonl, which may still grow; empty if there is none."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return cls(json_rows(file), settings)
        except FileNotFoundError:
            return cls(settings=settings)

    def add(self, row: Mapping[str, object]) -> None:
        """Add a row of metrics.jsonl."""
        step = row.get("step")
        if not isinstance(step, int):
            return
        for name, value in row.items():
            if name != "step" and (number := as_number(value)) is not None:
                self._data.setdefault(name, {})[step] = number
                self._sorted.pop(name, None)

    def total(self, *names: str) -> float:
        """Return the sum of all finite values of the metrics `names`, over all steps."""
        return math.fsum(value for name in names for value in self.values(name))

    def setting(self, key: str, default: object = None) -> object:
        """Return the value of a dotted key of the configuration, or `default` if the key is missing."""
        node: object = self.settings
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def names(self, prefix: str = "") -> list[str]:
        """Return the metric names that begin with `prefix`, sorted."""
        return sorted(name for name in self._data if name.startswith(prefix))

    def curve(self, *names: str) -> Curve:
        """Return the curve of the first of `names` that has values, or an empty curve."""
        for name in names:
            if name in self._data:
                if name not in self._sorted:
                    points = sorted(self._data[name].items())
                    self._sorted[name] = Curve([step for step, _ in points], [value for _, value in points])
                return self._sorted[name]
        return Curve([], [])

    def values(self, *names: str) -> list[float]:
        """Return the finite values of the first of `names` that has values, in step order."""
        return self.curve(*names).finite().values

    def by_step(self, name: str) -> dict[int, float]:
        """Return {step: value} of the finite values of a metric."""
        return dict(zip(*self.curve(name).finite()))

    def recent(self, *names: str) -> float | None:
        """Return the mean of the last ten finite values of the first of `names` with values; None without values."""
        values = self.values(*names)[-10:]
        return math.fsum(values) / len(values) if values else None

    def trend(self, name: str) -> Trend | None:
        """Return the change of the metric from the first to the last sixth of its values; None for fewer than six."""
        values = self.values(name)
        if len(values) < 6:
            return None
        stretch = max(2, min(20, round(len(values) / 6)))
        first, last = math.fsum(values[:stretch]) / stretch, math.fsum(values[-stretch:]) / stretch
        # consecutive steps differ only by noise, whose variance is half the mean square of their differences
        noise = math.fsum((b - a) ** 2 for a, b in zip(values, values[1:])) / (2 * (len(values) - 1))
        error, gap = math.sqrt(2 * noise / stretch), last - first
        sigmas = gap / error if error > 0 else math.copysign(math.inf, gap) if gap else 0.0
        return Trend(first, last, sigmas, stretch)

    @property
    def last_step(self) -> int:
        return max((max(points) for points in self._data.values()), default=0)


def validation_word(*histories: MetricHistory) -> str:
    """Return "accuracy" if all validation rewards were 0 or 1 (`validation/right_or_wrong`), otherwise "reward"."""
    flags = [value for history in histories for value in history.values("validation/right_or_wrong")]
    return "accuracy" if all(value == 1 for value in flags) else "reward"


# ---- data for the scripts of a page


def packed(data: Plain) -> str:
    """Return plain data as base64 of gzipped JSON, which is safe in HTML. Lone surrogates become question marks."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def metric_data(runs: Mapping[str, MetricHistory]) -> dict[str, Plain]:
    """Return {"runs": [{"name", "axes": [steps], "metrics": {name: entry}}]}, the data of the charts.

    An entry is [axis, values], where `axis` is an index into `axes`; a single number as values means a constant. A long
    curve is divided into buckets of steps: its entry is [axis, the lowest and highest value of each bucket, axis of the
    means, mean of each bucket]. Non-finite values are null."""
    return {"runs": [_run(name, history) for name, history in runs.items()]}


def _run(name: str, history: MetricHistory) -> dict[str, Plain]:
    axes: list[list[float]] = []
    numbers: dict[tuple[float, ...], int] = {}
    metrics: dict[str, Plain] = {}

    def axis(steps: Sequence[float]) -> int:
        if (key := tuple(steps)) not in numbers:
            numbers[key] = len(axes)
            axes.append(list(steps))
        return numbers[key]

    for metric in history.names():
        curve = history.curve(metric)
        steps, values = downsample(*curve)
        entry: list[Plain] = [axis(steps), [_short(value) for value in values]]
        if len(set(curve.values)) == 1 and math.isfinite(curve.values[0]):
            entry[1] = _short(curve.values[0])
        elif len(curve.steps) > MOST_POINTS:
            middles, means = _means(curve)
            entry += [axis(middles), [_short(value) for value in means]]
        metrics[metric] = entry
    return {"name": name, "axes": [*axes], "metrics": metrics}


def downsample(xs: Sequence[float], ys: Sequence[float], limit: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Return a curve (xs, ys) reduced to about `limit` points: its ends, and each bucket's minimum and maximum."""
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


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """Divide a long curve into buckets of steps, and return (last step of each bucket, mean of each bucket)."""
    steps, values = curve.finite()
    size = len(values) / (MOST_POINTS // 2)
    if size <= 1:
        return [*steps], values
    cuts = [round(number * size) for number in range(MOST_POINTS // 2 + 1)]
    pairs = list(zip(cuts, cuts[1:]))
    return [steps[b - 1] for _, b in pairs], [sum(values[a:b]) / (b - a) for a, b in pairs]


def _short(value: float) -> float | int | None:
    """Return the value rounded to six significant digits, as an int if it is whole, or None if it is not finite."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")


class Panel(NamedTuple):
    """A chart of the report. With `zero` the vertical axis begins at 0; with `smooth` a running mean is drawn."""

    title: str
    unit: str
    lines: Mapping[str, str]  # label -> metric
    zero: bool = False
    smooth: bool = False
    wide: bool = False
    flat: bool = False  # whether each line has one value, at all steps of all runs

    def spec(self) -> Plain:
        """Return the specification of the chart for chart.js."""
        lines = [{"label": label, "metric": metric} | _BANDS.get(metric, {}) for label, metric in self.lines.items()]
        return {"title": self.title, "zero": self.zero, "smooth": self.smooth, "lines": lines}


_BANDS = {"validation/accuracy": {"low": "validation/accuracy_ci95_low", "high": "validation/accuracy_ci95_high"}}
"""Metric -> the bounds of its confidence interval, which is drawn as a band."""
_LENGTHS = {"mean": "train/mean_gen_tokens_per_sample", "longest": "train/max_gen_tokens_per_sample"}
_EQUAL = {
    "all": "train/groups/pct_equal",
    "best": "train/groups/pct_equal_best",
    "worst": "train/groups/pct_equal_worst",
}
_RATIOS = {"mean": "train/probs_ratio", "lowest": "train/probs_ratio_min", "highest": "train/probs_ratio_max"}
_SPEEDS = {"whole step": "performance/tokens_per_sec", "generation": "performance/generation_tokens_per_sec"}
_PANELS = (
    Panel("Reward", "", {"reward": "train/reward"}, smooth=True, wide=True),
    Panel("Validation", "", {"": "validation/accuracy", "pass@k": "validation/pass_k"}),
    Panel("Loss", "", {"loss": "train/loss"}, smooth=True),
    Panel("Gradient norm", "", {"grad_norm": "train/grad_norm"}, zero=True, smooth=True),
    Panel("Entropy", "nats per token", {"approx_entropy": "train/approx_entropy"}, zero=True),
    Panel("Response length", "tokens", _LENGTHS, zero=True),
    Panel("Cut off at the length limit", "share", {"truncation_rate": "train/truncation_rate"}, zero=True),
    Panel("Groups with equal rewards", "%", _EQUAL, zero=True),
    Panel("KL to the reference", "per token", {"kl_penalty": "train/kl_penalty"}),
    Panel("Probability ratio", "", _RATIOS),
    Panel("Learning rate", "", {"lr": "train/lr"}, zero=True),
    Panel("Speed", "tokens per second", _SPEEDS, zero=True),
    Panel("token_mult_prob_error", "1 is exact", {"token_mult_prob_error": "train/token_mult_prob_error"}),
    Panel("Value loss", "", {"critic/loss": "train/critic/loss"}, zero=True),
    Panel("Explained variance", "of the value model", {"explained_var": "train/critic/explained_var"}),
    Panel("Memory after each step", "GiB", {"rss": "memory/rss_gb"}, zero=True),
)


def panels_of(histories: Sequence[MetricHistory]) -> list[Panel]:
    """Return the charts of the report that have values in any of the runs. Flat charts come last."""
    panels, word = [], validation_word(*histories)
    for panel in _PANELS:
        curves = {label: [h.values(metric) for h in histories] for label, metric in panel.lines.items()}
        curves = {label: of_runs for label, of_runs in curves.items() if any(of_runs)}
        if not curves:
            continue
        is_flat = all(len(set(chain(*of_runs))) <= 1 < max(map(len, of_runs)) for of_runs in curves.values())
        title = f"Validation {word}" if panel.title == "Validation" else panel.title
        lines = {label or word: panel.lines[label] for label in curves}
        panels.append(panel._replace(title=title, lines=lines, flat=is_flat))
    return sorted(panels, key=lambda panel: panel.flat)
