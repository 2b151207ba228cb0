"""A comparison as a page: curves over one another, timings, keys that differ."""

from collections.abc import Sequence
from html import escape

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.chart_data import metric_data
from nemo_rl_cpp.report.compare import Comparison
from nemo_rl_cpp.report.page import curves_section
from nemo_rl_cpp.report.panels import panels_of
from nemo_rl_cpp.report.shell import PageSection, document, parts

_COLORS = 9  # as many as chart.js has


def render_comparison(comparison: Comparison, now: float | None = None) -> str:
    """The page. `now`: Unix time that it says it was written at."""
    runs = comparison.runs
    histories = [run.history for run in runs]
    panels = panels_of(histories)
    specs: list[Plain] = [panel.spec() for panel in (*panels.moving, *panels.flat)]
    names = [run.name for run in runs]
    sections = [
        PageSection("results", "Side by side", parts().side_by_side(names, comparison.results(), _COLORS)),
        PageSection("curves", "Curves", curves_section(panels.moving, panels.flat, histories)),
        PageSection("keys", "Keys that differ", _keys(names, comparison)),
        PageSection("time", "Where the time goes", _timings(comparison)),
        PageSection("metrics", "All metrics", parts().metrics()),
    ]
    data: dict[str, Plain] = {"data-metrics": metric_data({run.name: run.history for run in runs}) | {"panels": specs}}
    title = " and ".join(names) if len(names) == 2 else f"{len(names)} runs"
    verdict = comparison.verdict() or f"{len(runs)} runs, without a validation that tells them apart."
    return document(f"{title} compared", parts().compared(runs, verdict, _COLORS), sections, data, now=now)


def _keys(names: Sequence[str], comparison: Comparison) -> str:
    keys = comparison.differing_keys()
    return parts().side_by_side(names, keys, _COLORS, code=True) if keys else f"<p>{escape(comparison.no_keys())}</p>"


def _timings(comparison: Comparison) -> str:
    timings = comparison.timings()
    most = max((seconds for _, means in timings for seconds in means), default=0.0)
    return parts().timings(timings, most, _COLORS) if most > 0 else ""
