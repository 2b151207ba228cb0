"""Puts the report of a run together, from what is known about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.chart_data import metric_data
from nemo_rl_cpp.report.findings import Finding, find
from nemo_rl_cpp.report.history import MetricHistory, validation_word
from nemo_rl_cpp.report.numbers import format_number
from nemo_rl_cpp.report.panels import Panel, panels_of
from nemo_rl_cpp.report.sections import STEP_TIME, configuration_section, mean_step_time, memory_section, time_spec
from nemo_rl_cpp.report.shell import PageSection, document, duration, parts

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
    """The page. `now`: Unix time that it says it was written at."""
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
