"""A comparison as a page: curves over one another, timings, keys that differ."""

from collections.abc import Sequence
from html import escape

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.chart_data import metric_data
from nemo_rl_cpp.report.compare import Comparison, Row
from nemo_rl_cpp.report.page import METRICS, curves_section
from nemo_rl_cpp.report.panels import panels_of
from nemo_rl_cpp.report.shell import PageSection, breakable, document

_COLORS = 9  # as many as chart.js has


def render_comparison(comparison: Comparison, now: float | None = None) -> str:
    """The page. `now`: Unix time that it says it was written at."""
    runs = comparison.runs
    histories = [run.history for run in runs]
    panels = panels_of(histories)
    specs: list[Plain] = [panel.spec() for panel in (*panels.moving, *panels.flat)]
    keys = comparison.differing_keys()
    names = [run.name for run in runs]
    sections = [
        PageSection("results", "Side by side", _table(names, comparison.results())),
        PageSection("curves", "Curves", curves_section(panels.moving, panels.flat, histories)),
        PageSection("keys", "Keys that differ", _keys(names, keys, comparison.no_keys())),
        PageSection("time", "Where the time goes", _timings(comparison)),
        PageSection("metrics", "All metrics", METRICS),
    ]
    data: dict[str, Plain] = {"data-metrics": metric_data({run.name: run.history for run in runs}) | {"panels": specs}}
    title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
    return document(f"{title} compared", _header(comparison), sections, data, now=now)


def _header(comparison: Comparison) -> str:
    legend = "".join(
        f'<li><i class="{_color(number)}"></i>{escape(run.name)} <b>{escape(str(run.facts.get("title") or ""))}</b></li>'
        for number, run in enumerate(comparison.runs)
    )
    verdict = comparison.verdict() or f"{len(comparison.runs)} runs, without a validation that tells them apart."
    return (
        f'<div class="top"><h1>comparison of {len(comparison.runs)} runs</h1></div>'
        f'<p class="verdict">{escape(verdict)}</p><ul class="legend large">{legend}</ul>'
    )


def _color(number: int) -> str:
    """The class that gives a run's mark the colour of its curves."""
    return f"b{number % _COLORS}"


def _heads(names: Sequence[str]) -> str:
    return "".join(
        f'<th><span class="swatch {_color(number)}"></span>{escape(name)}</th>' for number, name in enumerate(names)
    )


def _table(names: Sequence[str], rows: Sequence[Row], code: bool = False) -> str:
    body = "".join(
        f"<tr><td>{f'<code>{breakable(row.name)}</code>' if code else breakable(row.name)}</td>"
        + "".join(f"<td>{escape(value)}</td>" for value in row.values)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{_heads(names)}</tr>{body}</table></div>'


def _keys(names: Sequence[str], keys: Sequence[Row], none: str) -> str:
    if keys:
        return _table(names, keys, code=True)
    return f"<p>{escape(none)}</p>"


def _timings(comparison: Comparison) -> str:
    timings = comparison.timings()
    most = max((seconds for _, means in timings for seconds in means), default=0.0)
    if most <= 0:
        return ""
    rows = "".join(
        f"<li{'' if number else ' class=next'}><span>{breakable(label if number == 0 else '')}</span>"
        f'<i><b class="{_color(number)}" style="width:{100 * seconds / most:.1f}%"></b></i><em>{seconds:.3g}</em></li>'
        for label, means in timings
        for number, seconds in enumerate(means)
    )
    return f'<figure class="card"><h3>Mean time of each stage <small>seconds a step</small></h3><ul class="bars">{rows}</ul></figure>'
