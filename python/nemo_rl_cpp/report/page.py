"""The report of a run as a page: one HTML text without any reference outside itself."""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.findings import Finding, find
from nemo_rl_cpp.report.history import (
    MetricHistory,
    Panel,
    format_number,
    metric_data,
    packed,
    panels_of,
    validation_word,
)

_HERE = Path(__file__).parent
_SCRIPTS = ("base", "chart", "export", "metrics", "samples", "page")


class PageSection(NamedTuple):
    """A section: its id, its heading and its HTML."""

    key: str
    title: str
    content: str


def document(
    title: str, header: str, sections: Sequence[PageSection], data: Mapping[str, Plain], status: str = "finished", footer: str = "",
    now: float | None = None, scripts: Sequence[str] = _SCRIPTS,
) -> str:  # fmt: skip
    """The page. `data`: what the scripts read, by the id of its element; `now`: Unix time that it says it was written at; `scripts`:
    which of the page's scripts it has."""
    written = int(now if now is not None else time.time())
    style, code = (Markup("".join(map(_asset, names))) for names in (["page.css"], [f"{name}.js" for name in scripts]))
    shown = [section for section in sections if section.content]
    blocks = {key: packed(value) for key, value in data.items()}
    return str(
        parts().document(title, Markup(header), shown, blocks, status, footer, written, utc(written), style, code)
    )


@cache
def parts() -> Any:
    """The macros of page.html: each gives a part of a page as HTML in which every text is escaped."""
    import jinja2  # which takes a fifth of a second to load

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )  # fmt: skip
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").module


def breakable(name: str) -> Markup:
    """A metric's or stage's name as HTML that may be broken behind its underscores, slashes and dots."""
    return Markup(re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", str(escape(name))))


@cache
def _asset(name: str) -> str:
    """A file of this folder, read once: a package that is installed anew during a run does not mix two versions on a page."""
    return (_HERE / name).read_text(encoding="utf-8")


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Text of a length of time: `1 h 02 min`, `5 min 31 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


STEP_TIME = "timing/train/total_step_time"
BETWEEN_STEPS = ("checkpointing", "validation")  # stages after a step, which its total_step_time leaves out
_STAGES = (
    "generation",
    "policy_training",
    "policy_and_reference_logprobs",
    "value_training",
    "reward_calculation",
    "validation",
    "checkpointing",
    "data_processing",
    "advantage_calculation",
)
"""Stages with a colour of their own, the same in every run."""
_OTHER, _MORE = 9, (10, 11)
"""The colour of what is left, and those of large stages that have none of their own, by their names."""
_SMALL, _LARGE = 0.005, 0.03


def stage_colors(labels: Sequence[str]) -> dict[str, int]:
    """A colour number for each stage."""
    return {
        label: _STAGES.index(label) if label in _STAGES else _MORE[sum(map(ord, label)) % len(_MORE)]
        for label in labels
    }


def timing_name(history: MetricHistory, label: str) -> str:
    """The metric that holds a stage's seconds."""
    name = f"timing/train/{label}"
    return name if history.curve(name).values else f"{name}/total"


def time_spec(history: MetricHistory) -> dict[str, Plain] | None:
    """The stacked bars of a step's time, stages below half a percent left to "other"; None without times."""
    shares = stage_shares(history)
    labels = [label for label, share in shares.items() if share >= (_SMALL if label in _STAGES else _LARGE)]
    if not labels:
        return None
    colors = stage_colors(labels)
    labels.sort(key=colors.__getitem__)
    layers: list[Plain] = [
        {
            "label": label,
            "metric": timing_name(history, label),
            "color": colors[label],
            "share": shares[label],
            "beside": label in BETWEEN_STEPS,
        }
        for label in labels
    ]
    other = max(1 - sum(shares[label] for label in labels), 0.0)
    return {
        "title": "Seconds per step",
        "total": STEP_TIME,
        "stack": layers,
        "other": {"label": "other", "color": _OTHER, "share": other},
    }


def mean_step_time(history: MetricHistory) -> float | None:
    values = history.curve(STEP_TIME).finite().values
    return sum(values) / len(values) if values else None


def memory_section(history: MetricHistory) -> str:
    """A bar a phase: the most memory that was in use in it."""
    cards = []
    for title, prefix in (("Peak by phase", "memory/peak_rss_gb/"), ("GPU peak by phase", "memory/peak_gpu_gb/")):
        peaks = {
            name.removeprefix(prefix).removesuffix("/total"): max(values)
            for name in history.names(prefix)
            if not name.endswith("/run") and (values := history.curve(name).finite().values)
        }
        if peaks and max(peaks.values()) > 0:
            cards.append((title, sorted(peaks.items(), key=lambda item: -item[1])))
    return parts().memory(cards) if cards else ""


def configuration_section(
    config: Mapping[str, Plain], defaults: Mapping[str, object], given: Sequence[Mapping[str, Plain]] | None, base: str
) -> str:
    """What the user set; behind folds what else differs from the schema's defaults, and the whole. `given` None: not known."""
    if not config:
        return ""
    rows = given and [(str(r["key"]), _text(r["value"]), _text(r["before"]), str(r["where"])) for r in given]
    changed = differences(config, defaults) if defaults else []
    return parts().configuration(rows, base, changed, dump_yaml(dict(config)))


def _text(value: object) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differences(config: Mapping[str, object], defaults: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """(key, value, default) of every value that differs; a key that only one side has shows a dash on the other, and is
    left out when it is null there."""
    flat, base = flatten_dict(config, expand_lists=False), flatten_dict(defaults, expand_lists=False)

    def text(side: Mapping[str, object], key: str) -> str:
        value = side.get(key)
        return "–" if key not in side else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    keys = sorted(key for key in flat.keys() | base.keys() if flat.get(key) != base.get(key))
    return [(key, text(flat, key), text(base, key)) for key in keys]


def stage_shares(h: MetricHistory) -> dict[str, float]:
    """The share of each outermost stage in the time of all steps and of what lies between them, largest first.

    Stages within stages (with a `/`) and sums are left out, except that a group known only by its total
    (`prepare_for_generation/total`) counts as one.
    """
    seconds: dict[str, float] = {}
    for name in h.names("timing/train/"):
        label = name.removeprefix("timing/train/").removesuffix("/total")
        if label in ("total_step_time", "accounted_share") or "/" in label or "tokens_per_sec" in label:
            continue
        seconds[label] = h.total(name)
    total = h.total(STEP_TIME) + math.fsum(seconds.get(label, 0.0) for label in BETWEEN_STEPS)
    if total <= 0:
        return {}
    return dict(sorted(((k, v / total) for k, v in seconds.items()), key=lambda item: -item[1]))


__all__ = ["RunFacts", "duration", "render", "verdict"]


@dataclass(frozen=True)
class RunFacts:
    """Everything a page shows that is not a metric. `status`: running, finished, stopped in time, interrupted or failed. `given`: what the user
    set on top of the shipped file `base`, see `given.given_keys`; None where that is not known."""

    title: str
    status: str = "running"
    total_steps: int | None = None
    config: dict[str, Plain] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    samples: list[Plain] = field(default_factory=list)
    environment: Mapping[str, object] = field(default_factory=dict)
    message: str = ""
    given: list[dict[str, Plain]] | None = None
    base: str = ""


def render(history: MetricHistory, facts: RunFacts, now: float | None = None) -> str:
    found = find(history)
    panels = panels_of([history])
    specs: list[Plain] = [panel.spec() for panel in (*panels.moving, *panels.flat)]
    stack = time_spec(history)
    time_section = ""
    if stack is not None:
        specs.append(stack)
        mean = f"{mean_step_time(history) or 0:.2f} s on average"
        time_section = parts().figure("Seconds per step", "", mean, len(specs) - 1, "full")
    sections = [
        PageSection("findings", "What the numbers say", parts().findings(found)),
        PageSection("curves", "Curves", curves_section(panels.moving, panels.flat, [history])),
        PageSection("samples", "Samples", parts().samples() if facts.samples else ""),
        PageSection("time", "Where the time goes", time_section),
        PageSection("memory", "Memory", memory_section(history)),
        PageSection("metrics", "All metrics", parts().metrics() if history.names() else ""),
        PageSection(
            "config", "Configuration", configuration_section(facts.config, facts.defaults, facts.given, facts.base)
        ),
    ]
    data: dict[str, Plain] = {"data-metrics": metric_data({facts.title: history}) | {"panels": specs}}
    if facts.samples:
        data["data-samples"] = facts.samples
    done = f"{history.last_step}/{facts.total_steps} · " if facts.status == "running" and facts.total_steps else ""
    environment = "".join(f" · {key} {value}" for key, value in facts.environment.items())
    header = parts().header(facts, history.last_step, verdict(history, facts, found), _tiles(history, facts))
    return document(done + facts.title, header, sections, data, facts.status, environment, now)


def verdict(history: MetricHistory, facts: RunFacts, found: list[Finding]) -> str:
    """The run in one or two sentences, with the numbers of the terminal's table: those of single steps."""
    if history.last_step == 0:
        return facts.message or "No step has finished yet."
    rewards, trend = history.curve("train/reward").finite().values, history.trend("train/reward")
    steps = f"{history.last_step} step{'s' if history.last_step != 1 else ''}"
    span = _span(rewards)
    if trend is None:
        text = f"{steps} done" + (f", reward {span}" if rewards else "")
    elif trend.sigmas > 3:
        text = f"The policy is learning: reward {span} in {steps}"
    elif trend.sigmas < -3:
        text = f"The policy is getting worse: reward {span} in {steps}"
    else:
        text = f"No clear change in {steps}: reward {span}"
    means = history.curve("validation/accuracy").finite().values
    if means:
        text += f"; validation {validation_word(history)} {_span(means)}"
    problems = sum(finding.level == "bad" for finding in found)
    if problems:
        text += f". {problems} serious problem{'s' if problems > 1 else ''}: see below"
    return text + "." + (f" {facts.message}" if facts.message else "")


def _span(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    return f"{values[0]:.3f} → {values[-1]:.3f} (best {max(values):.3f})"


def _tiles(history: MetricHistory, facts: RunFacts) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure at the top of the page."""

    def values(name: str) -> list[float]:
        return history.curve(name).finite().values

    tiles = [("steps", f"{history.last_step}", f"of {facts.total_steps}" if facts.total_steps else "")]
    if rewards := values("train/reward"):
        tiles.append(("reward", f"{rewards[-1]:.3f}", f"first {rewards[0]:.3f}, best {max(rewards):.3f}"))
    if means := values("validation/accuracy"):
        low, high = values("validation/accuracy_ci95_low"), values("validation/accuracy_ci95_high")
        interval = f"95 %: {low[-1]:.3f} to {high[-1]:.3f}" if low and high else f"best {max(means):.3f}"
        tiles.append((f"validation {validation_word(history)}", f"{means[-1]:.3f}", interval))
    if speeds := values("performance/tokens_per_sec"):
        tiles.append(("tokens a second", f"{sum(speeds) / len(speeds):,.0f}", "over whole steps"))
    if (seconds := history.total(STEP_TIME, "timing/validation/total_validation_time")) > 0:
        tiles.append(("time", duration(seconds), f"{mean_step_time(history) or 0:.2f} s a step"))
    if peaks := values("memory/peak_rss_gb/run"):
        tiles.append(("peak memory", f"{max(peaks):.2f} GiB", ""))
    if errors := values("train/token_mult_prob_error"):
        exact, gaps = set(errors) == {1.0}, values("train/max_logprob_gap")
        note = f"largest gap {max(gaps):.3g}" if gaps else "token_mult_prob_error"
        tiles.append(("trainer = generator", "bit for bit" if exact else f"≤ {max(errors):.5g}", note))
    return tiles


def curves_section(moving: Sequence[Panel], flat: Sequence[Panel], histories: Sequence[MetricHistory]) -> str:
    """The charts, the flat ones behind a fold that names them with their values."""

    def last(panel: Panel, of: Sequence[MetricHistory]) -> list[str]:
        curves = [history.curve(panel.lines[0].metric).values for history in of]
        return [format_number(values[-1]) for values in curves if values]

    def cards(panels: Sequence[Panel], first: int) -> list[tuple[Panel, int, str]]:
        return [(panel, index, " · ".join(last(panel, histories))) for index, panel in enumerate(panels, first)]

    names = ", ".join(f"{panel.title} {value}" for panel in flat for value in last(panel, histories[:1]))
    return parts().curves(cards(moving, 0), cards(flat, len(moving)), names)
