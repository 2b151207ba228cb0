"""Line plots that need no plotting library: drawn as SVG, or handed to matplotlib where a tracker wants a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_cpp.compat.utils.svg import Series, line_chart
from nemo_rl_cpp.config.access import to_plain


@dataclass(frozen=True)
class LinePlot:
    """A figure of lines: `lines` maps a label to (xs, ys), `points` to one (x, y)."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    points: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def to_svg(self) -> str:
        """The whole figure as an SVG document."""
        series = [Series(label, list(xs), list(ys)) for label, (xs, ys) in self.lines.items()]
        series += [Series(label, [x], [y]) for label, (x, y) in self.points.items()]
        return line_chart(series, width=760, height=420, title=self.title, x_label=self.x_label, standalone=True)

    def to_matplotlib(self) -> Any:
        """A matplotlib Figure, or None where matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return None
        figure = Figure()
        axes = figure.add_subplot()
        for label, (xs, ys) in self.lines.items():
            axes.plot(xs, ys, label=label)
        for label, (x, y) in self.points.items():
            axes.plot([x], [y], "o", label=label)
        axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
        axes.grid(True, alpha=0.2)
        axes.legend()
        return figure


def timeline_plots(metrics: Mapping[int, list[Any]], name: str, interval: float) -> dict[str, LinePlot]:
    """`per_worker` and `average` plots of values sampled every `interval` seconds; none when there are no values."""
    if interval <= 0:
        raise ValueError(f"timeline_interval={interval}: give a positive number of seconds")
    values = {worker: [float(v) for v in metrics[worker]] for worker in sorted(metrics) if len(metrics[worker])}
    if not values:
        return {}

    def times(count: int) -> list[float]:
        return [index * interval for index in range(count)]

    lines = {f"worker_{worker}": (times(len(ys)), ys) for worker, ys in values.items()}
    shortest = min(map(len, values.values()))
    average = np.mean([ys[:shortest] for ys in values.values()], axis=0).tolist()
    return {
        "per_worker": LinePlot(name, "Time (s)", f"{name} (per worker)", lines),
        "average": LinePlot(name, "Time (s)", f"{name} (average)", {"average": (times(shortest), average)}),
    }


def logprob_error_plot(data: Mapping[str, Any]) -> LinePlot | None:
    """Log-probabilities of generator and trainer over the response of the sample where they differ most.

    The difference of a sample is the mean of exp(|generation - prev|) over its counted tokens. Samples without a counted
    token are left out; None when there are no others, or the response is empty.
    """

    def array(key: str) -> np.ndarray:
        return np.asarray(to_plain(data[key]), dtype=np.float64)

    token_mask = array("token_mask")[:, 1:]
    generation, previous = array("generation_logprobs")[:, 1:], array("prev_logprobs")[:, 1:]
    mask = token_mask * array("sample_mask")[:, None]
    counts = mask.sum(axis=1)
    if not (counts > 0).any():
        return None
    difference = np.abs(generation - previous) * token_mask
    error = np.where(counts > 0, (np.exp(difference) * mask).sum(axis=1) / np.maximum(counts, 1), -np.inf)
    sample = int(error.argmax())
    # column t of the shifted arrays predicts token t + 1
    first, last = int(array("prompt_lengths")[sample]) - 1, int(array("full_lengths")[sample]) - 1
    if first >= last:
        return None
    xs = list(range(first, last))
    gap, gen, prev = difference[sample, first:last], generation[sample, first:last], previous[sample, first:last]
    relative = np.abs(np.exp(gen) - np.exp(prev)) / np.exp(gen)
    widest, steepest = int(gap.argmax()), int(relative.argmax())
    return LinePlot(
        f"token_mult_prob_error = {error[sample]:.6g} (sample {sample})",
        "Token Position (starting from prompt end)",
        "Log Probability/Difference",
        {
            "logprob (generation)": (xs, gen.tolist()),
            "logprob (training policy recompute)": (xs, prev.tolist()),
            "abs error": (xs, gap.tolist()),
        },
        {
            f"Max abs error: {gap[widest]:.4g}": (xs[widest], float(gap[widest])),
            f"Max rel error (prob): {relative[steepest]:.4g}": (xs[steepest], float(gap[steepest])),
        },
    )


def matplotlib_figure(figure: Any) -> Any:
    """A matplotlib Figure of a figure or `LinePlot`; None when a LinePlot meets no matplotlib."""
    return figure.to_matplotlib() if hasattr(figure, "to_matplotlib") else figure
