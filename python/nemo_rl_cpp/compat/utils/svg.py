"""Curves as SVG text, drawn by hand: no plotting library, no external file, colours from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from nemo_rl_cpp.report.numbers import downsample, format_number

_COLORS = ("#2f6fde", "#d9632b", "#1f9d6b", "#a24bc4", "#b98a00", "#cc3b5c", "#3a9fb5", "#7a6f5d")
_STANDALONE_STYLE = (
    "<style>text{font:11px sans-serif;fill:#555}.title{font-size:14px;fill:#111}.grid{stroke:#ddd}.axis{stroke:#999}"
    + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(_COLORS))
    + ".line{fill:none;stroke-width:1.6}.raw{fill:none;stroke-width:1;opacity:.3}</style>"
)


@dataclass(frozen=True)
class Series:
    """One line: its label and points; not finite ys leave a gap. `smooth` adds a running mean over a faint raw line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    smooth: bool = False


class Frame(NamedTuple):
    """Where data coordinates lie on the drawing: the data ranges and the pixel box."""

    x0: float
    x1: float
    y0: float
    y1: float
    left: float
    top: float
    right: float
    bottom: float

    def px(self, x: float) -> float:
        return self.left + (x - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def py(self, y: float) -> float:
        return self.bottom - (y - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within [low, high], about `count` of them."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(span / (step * factor) - count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def running_mean(ys: Sequence[float], window: int) -> list[float]:
    """Exponential running mean without a start bias, of time constant `window`; not finite values are passed over."""
    decay, total, weight, result = 1.0 - 1.0 / max(window, 1), 0.0, 0.0, []
    for y in ys:
        if math.isfinite(y):
            total, weight = total * decay + y, weight * decay + 1.0
        result.append(total / weight if weight else math.nan)
    return result


def line_chart(
    series: Sequence[Series],
    *,
    width: int = 420,
    height: int = 190,
    title: str = "",
    x_label: str = "step",
    zero_based: bool = False,
    standalone: bool = False,
) -> str:
    """The SVG of lines over a common x axis, with grid, numbers and, for more than one line, a legend.

    Points alone (one x) are drawn as dots. Without a finite point the drawing says that there are none.
    """
    drawn = [Series(s.label, *downsample(s.xs, s.ys), s.smooth) for s in series]
    frame = line_frame(drawn, width, height, zero_based, titled=standalone and bool(title), labelled=standalone)
    if frame is None:
        return _wrap(_no_values(width, height), width, height, title, standalone)
    parts = [_grid(frame)]
    for index, s in enumerate(drawn):
        parts.append(_draw_line(s, index % len(_COLORS), frame))
    if len(drawn) > 1:
        parts.append(_legend([s.label for s in drawn], frame))
    if standalone:
        parts.append(
            f'<text x="{(frame.left + frame.right) / 2:.0f}" y="{height - 4}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
        )
    return _wrap("".join(parts), width, height, title, standalone)


def line_frame(
    drawn: Sequence[Series], width: int, height: int, zero_based: bool, titled: bool = False, labelled: bool = False
) -> Frame | None:
    """Where `line_chart` puts the points of these series; None when no point is finite."""
    xs = [x for s in drawn for x, y in zip(s.xs, s.ys, strict=True) if math.isfinite(y)]
    ys = [y for s in drawn for y in s.ys if math.isfinite(y)]
    if not ys:
        return None
    low, high = padded_range(min(ys), max(ys), zero_based)
    x0, x1 = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    top = (22 if titled else 8) + (16 if len(drawn) > 1 else 0)
    return Frame(x0, x1, low, high, 46, top, width - 8, height - (34 if labelled else 20))


def padded_range(low: float, high: float, zero_based: bool = False) -> tuple[float, float]:
    """The range of an axis: some room around the data, also when all values are equal."""
    if zero_based and low >= 0:
        return 0.0, (high or 1.0) * 1.06
    pad = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-3)
    return low - pad, high + pad


def _no_values(width: int, height: int) -> str:
    return f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">no values yet</text>'


def _grid(frame: Frame) -> str:
    parts = []
    for y in nice_ticks(frame.y0, frame.y1):
        py = frame.py(y)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{py:.1f}" y2="{py:.1f}"/>'
            f'<text x="{frame.left - 5}" y="{py + 3.5:.1f}" text-anchor="end">{format_number(y)}</text>'
        )
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    for x in nice_ticks(frame.x0, frame.x1, 5):
        parts.append(
            f'<text x="{frame.px(x):.1f}" y="{frame.bottom + 14}" text-anchor="middle">{format_number(x)}</text>'
        )
    return "".join(parts)


def _draw_line(series: Series, color: int, frame: Frame) -> str:
    if len(series.xs) == 1:
        return f'<circle class="f{color}" cx="{frame.px(series.xs[0]):.1f}" cy="{frame.py(series.ys[0]):.1f}" r="3"/>'
    smooth = series.smooth and len(series.ys) >= 12
    parts = [f'<path class="{"raw" if smooth else "line"} s{color}" d="{_path(series.xs, series.ys, frame)}"/>']
    if smooth:
        mean = running_mean(series.ys, max(3, len(series.ys) // 20))
        parts.append(f'<path class="line s{color}" d="{_path(series.xs, mean, frame)}"/>')
    if len(series.xs) <= 12:
        parts += [
            f'<circle class="f{color}" cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="2.2"/>'
            for x, y in zip(series.xs, series.ys, strict=True)
            if math.isfinite(y)
        ]
    return "".join(parts)


def _path(xs: Sequence[float], ys: Sequence[float], frame: Frame) -> str:
    commands, pen_down = [], False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{frame.px(x):.1f} {frame.py(y):.1f}")
        pen_down = math.isfinite(y)
    return "".join(commands)


def _legend(labels: Sequence[str], frame: Frame) -> str:
    x, parts = frame.left, []
    for index, label in enumerate(labels):
        parts.append(
            f'<rect class="f{index % len(_COLORS)}" x="{x:.0f}" y="{frame.top - 15}" width="10" height="3"/>'
            f'<text x="{x + 14:.0f}" y="{frame.top - 10}">{escape(label)}</text>'
        )
        x += 24 + 6.2 * len(label)
    return "".join(parts)


def _wrap(body: str, width: int, height: int, title: str, standalone: bool) -> str:
    label = f' role="img" aria-label="{escape(title, quote=True)}"' if title else ""
    head = f'<text class="title" x="8" y="17">{escape(title)}</text>' if standalone and title else ""
    extra = f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"' if standalone else ""
    style = _STANDALONE_STYLE if standalone else ""
    return f'<svg{extra} viewBox="0 0 {width} {height}"{label}>{style}{head}{body}</svg>'
