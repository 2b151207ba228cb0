"""The report page of a run, as self-contained HTML, which is kept up to date in the log folder during the run."""

import json
import math
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from nemo_rl_cpp.config.access import to_json, to_plain, written
from nemo_rl_cpp.config.loader import config_folders
from nemo_rl_cpp.config.master import MasterConfig
from nemo_rl_cpp.files.durable import json_object, writable, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml
from nemo_rl_cpp.loggers.folders import HYPERPARAMS, METRICS
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
from nemo_rl_cpp.report.samples import SampleBook, TokenBytes

_HERE = Path(__file__).parent
_SCRIPTS = ("base", "chart", "export", "metrics", "samples", "page")
_COLORS = 9  # the number of colors of runs in chart.js

Rows = Mapping[str, Sequence[str]]  # a table of several runs: the name of each row, and one text per run


class PageSection(NamedTuple):
    """A section of a page: its id, its heading and its HTML."""

    key: str
    title: str
    content: str


def document(
    title: str, header: str, sections: Sequence[PageSection], data: Mapping[str, Plain], status: str = "finished",
    footer: str = "",
) -> str:  # fmt: skip
    """Return the HTML of a page. `header` is HTML, `data` maps ids of elements to data for the page's scripts, `status`
    is the state of the run, and `footer` is a line of text."""
    written = int(time.time())
    style = Markup(_asset("page.css"))
    code = Markup("".join(_asset(f"{name}.js") for name in _SCRIPTS))
    shown = [section for section in sections if section.content]
    blocks = {key: packed(value) for key, value in data.items()}
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written))
    return str(parts().document(title, Markup(header), shown, blocks, status, footer, written, at, style, code))


@cache
def parts() -> Any:
    """Return the Jinja macros of page.html. Each returns a part of a page as HTML, with text escaped."""
    import jinja2  # importing jinja2 takes a fifth of a second

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    # allow line breaks in long metric names after underscores, slashes and dots
    environment.filters["breakable"] = lambda name: Markup(re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", str(escape(name))))
    return environment.get_template("page.html").module


@cache
def _asset(name: str) -> str:
    """Read a file of this folder and cache it, so that upgrading the package during a run does not mix versions."""
    return (_HERE / name).read_text(encoding="utf-8")


def duration(seconds: float) -> str:
    """Return a duration as text, such as `1 h 02 min`, `5 min 31 s` or `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)


# ---- where the time goes

STEP_TIME = "timing/train/total_step_time"
_BETWEEN_STEPS = ("checkpointing", "validation")  # stages after a step, which total_step_time does not include
_STAGES = (
    "generation", "policy_training", "policy_and_reference_logprobs", "value_training", "reward_calculation",
    "validation", "checkpointing", "data_processing", "advantage_calculation",
)  # fmt: skip
"""Stages that have the same colour in every run: the colour with the stage's index."""
_OTHER, _MORE = 9, (10, 11)
"""The colour of all small stages together, and the colours for large stages that are not in `_STAGES`."""
_SMALL, _LARGE = 0.005, 0.03


def stage_shares(h: MetricHistory) -> dict[str, float]:
    """Return {top-level stage: its share of the time in and between steps}, largest first. A group of stages of which
    only the total is logged counts as one."""
    seconds: dict[str, float] = {}
    for name in h.names("timing/train/"):
        label = name.removeprefix("timing/train/").removesuffix("/total")
        if label not in ("total_step_time", "accounted_share") and "/" not in label and "tokens_per_sec" not in label:
            seconds[label] = h.total(name)
    total = h.total(STEP_TIME) + math.fsum(seconds.get(label, 0.0) for label in _BETWEEN_STEPS)
    if total <= 0:
        return {}
    return dict(sorted(((label, value / total) for label, value in seconds.items()), key=lambda item: -item[1]))


def _time_spec(history: MetricHistory) -> dict[str, Plain] | None:
    """Return the specification of a stacked bar chart of the stages' times; None if no stage was timed."""
    shares = stage_shares(history)
    colors = {
        label: _STAGES.index(label) if label in _STAGES else _MORE[sum(map(ord, label)) % len(_MORE)]
        for label, share in shares.items()
        if share >= (_SMALL if label in _STAGES else _LARGE)
    }
    if not colors:
        return None
    layers: list[Plain] = []
    for label, color in sorted(colors.items(), key=lambda item: item[1]):
        name = f"timing/train/{label}"
        metric = name if history.curve(name).values else f"{name}/total"
        layer = {"label": label, "metric": metric, "color": color, "share": shares[label]}
        layers.append(layer | {"beside": label in _BETWEEN_STEPS})
    other = {"label": "other", "color": _OTHER, "share": max(1 - sum(shares[label] for label in colors), 0.0)}
    return {"title": "Seconds per step", "total": STEP_TIME, "stack": layers, "other": other}


def _mean_step_time(history: MetricHistory) -> float:
    values = history.values(STEP_TIME)
    return sum(values) / len(values) if values else 0.0


def _memory_section(history: MetricHistory) -> str:
    """Return HTML with bars for the peak memory of each phase."""
    cards = []
    for title, prefix in (("Peak by phase", "memory/peak_rss_gb/"), ("GPU peak by phase", "memory/peak_gpu_gb/")):
        peaks = {
            name.removeprefix(prefix).removesuffix("/total"): max(values)
            for name in history.names(prefix)
            if not name.endswith("/run") and (values := history.values(name))
        }
        if peaks and max(peaks.values()) > 0:
            cards.append((title, sorted(peaks.items(), key=lambda item: -item[1])))
    return parts().memory(cards) if cards else ""


# ---- the page of a run


@dataclass(frozen=True)
class RunFacts:
    """The content of a run's report page apart from the metrics."""

    title: str
    status: str = "running"  # "running", "finished", "stopped in time", "interrupted" or "failed"
    total_steps: int | None = None
    config: dict[str, Plain] = field(default_factory=dict)
    samples: list[Plain] = field(default_factory=list)
    environment: Mapping[str, object] = field(default_factory=dict)
    message: str = ""
    given: list[dict[str, Plain]] | None = None  # {"key", "value", "where"} of each key that is set; None: unknown


def render(history: MetricHistory, facts: RunFacts) -> str:
    found = find(history)
    panels = panels_of([history])
    specs = [panel.spec() for panel in panels]
    time_section = ""
    if (stack := _time_spec(history)) is not None:
        specs.append(stack)
        mean = f"{_mean_step_time(history):.2f} s on average"
        time_section = parts().figure("Seconds per step", "", mean, len(specs) - 1, "full")
    config_section = ""
    if facts.config:
        given = facts.given and [(row["key"], text_of(row["value"]), row["where"]) for row in facts.given]
        config_section = parts().configuration(given, dump_yaml(dict(facts.config)))
    sections = [
        PageSection("findings", "What the numbers say", parts().findings(found)),
        PageSection("curves", "Curves", curves_section(panels, [history])),
        PageSection("samples", "Samples", parts().samples() if facts.samples else ""),
        PageSection("time", "Where the time goes", time_section),
        PageSection("memory", "Memory", _memory_section(history)),
        PageSection("metrics", "All metrics", parts().metrics() if history.names() else ""),
        PageSection("config", "Configuration", config_section),
    ]
    data: dict[str, Plain] = {"data-metrics": metric_data({facts.title: history}) | {"panels": specs}}
    if facts.samples:
        data["data-samples"] = facts.samples
    done = f"{history.last_step}/{facts.total_steps} · " if facts.status == "running" and facts.total_steps else ""
    environment = "".join(f" · {key} {value}" for key, value in facts.environment.items())
    numbers = tiles(history, facts.total_steps)
    header = parts().header(facts, history.last_step, verdict(history, facts, found), numbers)
    return document(done + facts.title, header, sections, data, facts.status, environment)


def render_side_by_side(
    histories: Mapping[str, MetricHistory], tables: Mapping[str, Rows], verdict: Sequence[str]
) -> str:
    """Return the HTML of a page that compares runs: their curves, `tables` with a column per run, and `verdict`,
    sentences on which run is better."""
    title, runs = f"comparison of {len(histories)} runs", list(histories.values())
    panels = panels_of(runs)
    sections = [
        PageSection(name.replace(" ", "-"), name, parts().side_by_side(histories, rows, _COLORS) if rows else "")
        for name, rows in tables.items()
    ]
    sections.append(PageSection("curves", "Curves", curves_section(panels, runs)))
    sections.append(PageSection("metrics", "All metrics", parts().metrics()))
    data: dict[str, Plain] = {"data-metrics": metric_data(histories) | {"panels": [panel.spec() for panel in panels]}}
    return document(title, parts().compared(title, histories, verdict, _COLORS), sections, data)


def verdict(history: MetricHistory, facts: RunFacts, found: list[Finding]) -> str:
    """Return one or two sentences on how the run went. Before the first step it is the message in `facts`."""
    if history.last_step == 0:
        return facts.message or "No step has finished yet."
    rewards, trend = history.values("train/reward"), history.trend("train/reward")
    steps = f"{history.last_step} step{'s' if history.last_step != 1 else ''}"
    span = f"reward {_span(rewards)}"
    if trend is None:
        text = f"{steps} done" + (f", {span}" if rewards else "")
    elif abs(trend.sigmas) > 3:
        text = f"The policy is {'learning' if trend.sigmas > 0 else 'getting worse'}: {span} in {steps}"
    else:
        text = f"No clear change in {steps}: {span}"
    means = history.values("validation/accuracy")
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


def tiles(history: MetricHistory, total_steps: int | None) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure at the top of the page. `total_steps` may be unknown (None)."""
    values = history.values
    tiles = [("steps", f"{history.last_step}", f"of {total_steps}" if total_steps else "")]
    if rewards := values("train/reward"):
        tiles.append(("reward", f"{rewards[-1]:.3f}", f"first {rewards[0]:.3f}, best {max(rewards):.3f}"))
    if means := values("validation/accuracy"):
        low, high = values("validation/accuracy_ci95_low"), values("validation/accuracy_ci95_high")
        interval = f"95 %: {low[-1]:.3f} to {high[-1]:.3f}" if low and high else f"best {max(means):.3f}"
        tiles.append((f"validation {validation_word(history)}", f"{means[-1]:.3f}", interval))
    if speeds := values("performance/tokens_per_sec"):
        tiles.append(("tokens a second", f"{sum(speeds) / len(speeds):,.0f}", "over whole steps"))
    if (seconds := history.total(STEP_TIME, "timing/validation/total_validation_time")) > 0:
        tiles.append(("time", duration(seconds), f"{_mean_step_time(history):.2f} s a step"))
    if peaks := values("memory/peak_rss_gb/run"):
        tiles.append(("peak memory", f"{max(peaks):.2f} GiB", ""))
    if errors := values("train/token_mult_prob_error"):
        exact, gaps = set(errors) == {1.0}, values("train/max_logprob_gap")
        note = f"largest gap {max(gaps):.3g}" if gaps else "token_mult_prob_error"
        tiles.append(("trainer = generator", "bit for bit" if exact else f"≤ {max(errors):.5g}", note))
    return tiles


def curves_section(panels: Sequence[Panel], histories: Sequence[MetricHistory]) -> str:
    """Return the charts `panels` as HTML. Flat ones (`Panel.flat`) are collapsed under their names and values."""

    def last(panel: Panel, of: Sequence[MetricHistory]) -> list[str]:
        curves = [history.curve(next(iter(panel.lines.values()))).values for history in of]
        return [format_number(values[-1]) for values in curves if values]

    cards = [(panel, index, " · ".join(last(panel, histories))) for index, panel in enumerate(panels)]
    moving, flat = ([card for card in cards if card[0].flat == is_flat] for is_flat in (False, True))
    names = ", ".join(f"{panel.title} {value}" for panel, _, _ in flat for value in last(panel, histories[:1]))
    return parts().curves(moving, flat, names)


REPORT = "report.html"
FACTS = "report_facts.json"
_MIN_SECONDS = 5.0  # between two pages
_STORED = ("title", "status", "message", "total_steps", "environment", "given")


class ReportWriter:
    """A writer of `<log_dir>/report.html`, from metrics.jsonl and the rollout files in the folder. `update()`, called
    after each step, writes the file atomically, at most every five seconds, and less often if writing would take more
    than 2 % of the time."""

    def __init__(
        self, log_dir: Path | str, config: MasterConfig | None = None, total_steps: int | None = None,
        title: str | None = None, token_bytes: TokenBytes | None = None,
    ) -> None:  # fmt: skip
        """Read the files of the folder. Without `config`, use hyperparams.json and the facts of an earlier report."""
        self.log_dir = Path(log_dir)
        self.path = self.log_dir / REPORT
        self._book = SampleBook(self.log_dir, token_bytes)
        self._last_written = -float("inf")
        self._cost = 0.0
        self._warned = False
        facts = json_object(self.log_dir / FACTS)
        self._facts = RunFacts(
            title=title or str(facts.get("title") or "/".join(self.log_dir.absolute().parts[-2:])),
            status=str(facts.get("status", "running")),
            message=str(facts.get("message", "")),
            total_steps=total_steps or facts.get("total_steps"),
            config=written(config) if config is not None else json_object(self.log_dir / HYPERPARAMS),
            environment=facts.get("environment") or _environment(),
            given=keys_set(config) if config is not None else facts.get("given"),
        )

    def update(self, status: str | None = None, message: str | None = None, force: bool = False) -> bool:
        """Set the run's `status` and `message` (None: unchanged). Then write the page if it is due or `force` is set,
        and return whether it was written. If it cannot be written, print the reason once."""
        changed = {name: text for name, text in (("status", status), ("message", message)) if text is not None}
        self._facts = replace(self._facts, **changed)
        now = time.monotonic()
        if not force and now - self._last_written < max(_MIN_SECONDS, 50 * self._cost):
            return False
        try:
            self._write()
        except (OSError, ValueError) as error:
            if not self._warned:
                text = f"{self.path} could not be written: {error}"
                print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
            self._warned = True
            return False
        finally:
            self._last_written = time.monotonic()
            self._cost = self._last_written - now
        return True

    def _write(self) -> None:
        history = MetricHistory.of_file(self.log_dir / METRICS, self._facts.config)
        page = render(history, replace(self._facts, samples=self._book.samples()))
        stored = {name: getattr(self._facts, name) for name in _STORED}
        write_atomic(self.log_dir / FACTS, json.dumps(to_json(stored)), durable=False)
        write_atomic(self.path, writable(page), durable=False)  # the folder's name may hold lone surrogates


def write_report(log_dir: Path | str) -> Path:
    """Write report.html of a log folder, and return its path. Raise ValueError if it has no metrics.jsonl."""
    if not (Path(log_dir) / METRICS).exists():
        raise ValueError(f"{log_dir} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    writer = ReportWriter(log_dir)
    writer._write()
    return writer.path


def keys_set(config: MasterConfig) -> list[dict[str, Plain]]:
    """Return {"key", "value", "where"} of each key that the command line, a Python call or a user's file sets."""
    settings, positions = MetricHistory(settings=written(config)), config.positions
    rows: dict[str, dict[str, Plain]] = {}
    for key, where in positions.items():
        is_section = any(other.startswith((f"{key}.", f"{key}[")) for other in positions)
        place = None if is_section else _place(where)
        if place is not None:
            name = key.partition("[")[0]  # a list is shown whole
            rows[name] = {"key": name, "value": settings.setting(name), "where": place}
    return list(rows.values())


def _place(where: str) -> str | None:
    """Return a readable name of the file or override that set a key; None for a file of this package."""
    if where.startswith("override "):
        return "command line"
    file, _, number = where.rpartition(":")
    if not number.isdigit():
        return where
    shipped = any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in config_folders())
    return None if shipped else f"{Path(file).name}:{number}"


def _environment() -> dict[str, str]:
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    torch = sys.modules.get("torch")
    return facts | ({"torch": str(torch.__version__)} if torch is not None else {})
