"""The metrics of runs as the page's scripts read them: every value of up to 500 steps, compressed."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.history import Curve, MetricHistory
from nemo_rl_cpp.report.numbers import downsample

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
