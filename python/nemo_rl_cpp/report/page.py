"""Puts the report together: from what is known about a run to one HTML text without any reference outside itself."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report import svg
from nemo_rl_cpp.report.finding import Finding
from nemo_rl_cpp.report.findings import find
from nemo_rl_cpp.report.findings_health import BETWEEN_STEPS, STEP_TIME, stage_shares
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.samples import Sample
from nemo_rl_cpp.report.svg import Series, format_number

_HERE = Path(__file__).parent
# title, unit, zero-based axis, {label: metric}; a panel appears when any of its metrics has values
PANELS: list[tuple[str, str, bool, dict[str, str]]] = [
    ("Reward", "", False, {"reward": "train/reward"}),
    ("Validation", "", False, {"accuracy": "validation/accuracy", "pass@k": "validation/pass_k"}),
    ("Loss", "", False, {"loss": "train/loss"}),
    ("Gradient norm", "", True, {"grad_norm": "train/grad_norm"}),
    ("Entropy", "nats per token", True, {"approx_entropy": "train/approx_entropy"}),
    (
        "Response length",
        "tokens",
        True,
        {"mean": "train/mean_gen_tokens_per_sample", "longest": "train/max_gen_tokens_per_sample"},
    ),
    ("Cut off at the length limit", "share", True, {"truncation_rate": "train/truncation_rate"}),
    ("token_mult_prob_error", "1.0 is exact", False, {"token_mult_prob_error": "train/token_mult_prob_error"}),
    ("KL to the reference", "per token", False, {"kl_penalty": "train/kl_penalty"}),
    (
        "Groups with equal rewards",
        "%",
        True,
        {
            "all": "train/groups/pct_equal",
            "best": "train/groups/pct_equal_best",
            "worst": "train/groups/pct_equal_worst",
        },
    ),
    (
        "Probability ratio",
        "",
        False,
        {"mean": "train/probs_ratio", "lowest": "train/probs_ratio_min", "highest": "train/probs_ratio_max"},
    ),
    ("Learning rate", "", True, {"lr": "train/lr"}),
    (
        "Speed",
        "tokens per second",
        True,
        {"whole step": "performance/tokens_per_sec", "generation": "performance/generation_tokens_per_sec"},
    ),
    ("Value loss", "", True, {"critic/loss": "train/critic/loss"}),
    ("Explained variance", "of the value model", False, {"explained_var": "train/critic/explained_var"}),
]
_SMOOTHED = {"Reward", "Loss", "Gradient norm"}
_STATUS_TEXT = {"running": "running", "finished": "finished", "interrupted": "interrupted", "failed": "failed"}


@dataclass(frozen=True)
class RunFacts:
    """Everything a page shows that is not a metric. `status`: running, finished, interrupted or failed."""

    title: str
    status: str = "running"
    total_steps: int | None = None
    config: dict[str, Plain] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    environment: Mapping[str, object] = field(default_factory=dict)
    message: str = ""


def render(history: MetricHistory, facts: RunFacts, now: float | None = None) -> str:
    """The page. `now`: Unix time that it says it was written at."""
    found = find(history)
    sections = [
        ("findings", "What the numbers say", _findings(found)),
        ("curves", "Curves", _curves(history)),
        ("time", "Where the time goes", _time(history)),
        ("memory", "Memory", _memory(history)),
        ("samples", "Samples", _samples(facts.samples)),
        ("config", "Configuration", _configuration(facts)),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{content}</section>' for key, title, content in sections
    )
    written = int(now if now is not None else time.time())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(facts.title)}</title><style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style></head>"
        f'<body data-status="{escape(facts.status)}" data-written="{written}">'
        f"<header>{_header(history, facts, found, written)}<nav>{links}</nav></header><main>{body}</main>"
        f"<footer>Written {_utc(written)} by nemo_rl_cpp{_environment(facts.environment)}</footer>"
        f"<script>{(_HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def verdict(history: MetricHistory, facts: RunFacts, found: list[Finding]) -> str:
    """The run in one or two sentences."""
    if history.last_step == 0:
        return facts.message or "No step has finished yet."
    trend = history.trend("train/reward")
    steps = f"{history.last_step} step{'s' if history.last_step != 1 else ''}"
    if trend is None:
        reward = history.recent("train/reward")
        text = f"{steps} done" + ("" if reward is None else f", reward {format_number(reward)} so far")
    elif trend.sigmas > 3:
        text = f"The policy is learning: reward {format_number(trend.first)} → {format_number(trend.last)} in {steps}"
    elif trend.sigmas < -3:
        text = (
            f"The policy is getting worse: reward {format_number(trend.first)} → {format_number(trend.last)} in {steps}"
        )
    else:
        text = f"No clear change in {steps}: reward {format_number(trend.first)} → {format_number(trend.last)}"
    accuracy = history.curve("validation/accuracy").finite().values
    if len(accuracy) > 1:
        text += f", validation accuracy {format_number(accuracy[0])} → {format_number(accuracy[-1])}"
    problems = sum(finding.level == "bad" for finding in found)
    if problems:
        text += f". {problems} serious problem{'s' if problems > 1 else ''}: see below"
    return text + "." + (f" {facts.message}" if facts.message else "")


def _header(history: MetricHistory, facts: RunFacts, found: list[Finding], written: int) -> str:
    done = history.last_step
    share = min(done / facts.total_steps, 1.0) if facts.total_steps else None
    progress = ""
    if share is not None:
        bar = f'<div style="width:{100 * share:.1f}%"></div>'
        progress = f'<div class="progress" title="{done} of {facts.total_steps} steps">{bar}</div>'
    tiles = "".join(
        f'<div class="tile"><span>{escape(k)}</span><b>{escape(v)}</b></div>' for k, v in _tiles(history, facts)
    )
    status = _STATUS_TEXT.get(facts.status, facts.status)
    return (
        f'<div class="top"><h1>{escape(facts.title)}</h1><span class="pill {escape(facts.status)}">{escape(status)}</span>'
        f'<span class="age" id="age"></span></div><p class="verdict">{escape(verdict(history, facts, found))}</p>'
        f'{progress}<div class="tiles">{tiles}</div>'
    )


def _tiles(history: MetricHistory, facts: RunFacts) -> list[tuple[str, str]]:
    def shown(name: str, count: int = 10) -> str | None:
        value = history.recent(name, count=count)
        return None if value is None else format_number(value)

    seconds = history.total(STEP_TIME, "timing/validation/total_validation_time")
    peak = history.curve("memory/peak_rss_gb/run").finite().values
    error = history.curve("train/token_mult_prob_error").finite().values
    accuracy = history.curve("validation/accuracy").finite().values
    tiles = [
        ("steps", f"{history.last_step}" + (f" / {facts.total_steps}" if facts.total_steps else "")),
        ("reward (last 10)", shown("train/reward")),
        ("validation: last / best", f"{accuracy[-1]:.3g} / {max(accuracy):.3g}" if accuracy else None),
        ("tokens per second", shown("performance/tokens_per_sec")),
        ("time in steps", duration(seconds) if seconds else None),
        ("peak memory", f"{max(peak):.2f} GiB" if peak else None),
        ("trainer = generator", None if not error else "bit for bit" if set(error) == {1.0} else f"≤ {max(error):.5g}"),
    ]
    return [(name, value) for name, value in tiles if value is not None]


def _findings(found: list[Finding]) -> str:
    if not found:
        return '<p class="muted">Nothing to say yet: most findings need six steps or more.</p>'
    items = "".join(
        f'<li class="{f.level}"><b>{escape(f.title)}</b><p>{escape(f.advice)} <code>{escape(f.metric)}</code></p></li>'
        for f in found
    )
    return f'<ul class="findings">{items}</ul>'


def _curves(history: MetricHistory) -> str:
    cards = []
    for title, unit, zero_based, metrics in PANELS:
        series = [
            Series(label, curve.steps, curve.values, smooth=title in _SMOOTHED)
            for label, name in metrics.items()
            if (curve := history.curve(name)).finite().values
        ]
        if series:
            last = series[0].ys[-1]
            cards.append(_card(title, unit, format_number(last), series, zero_based, wide=title == "Reward"))
    return f'<div class="grid">{"".join(cards)}</div>' if cards else '<p class="muted">No values yet.</p>'


def _card(title: str, unit: str, value: str, series: list[Series], zero_based: bool, wide: bool = False) -> str:
    width, height = (860, 230) if wide else (420, 190)
    drawing = svg.line_chart(series, width=width, height=height, title=title, zero_based=zero_based)
    head = f"<h3>{escape(title)} <small>{escape(unit)}</small><span>{escape(value)}</span></h3>"
    hover = _hover(series, width, height, zero_based)
    return f'<figure class="card{" wide" if wide else ""}" data-chart="{escape(hover, quote=True)}">{head}{drawing}</figure>'


def _hover(series: list[Series], width: int, height: int, zero_based: bool) -> str:
    """The points of a chart and where they lie, for the cross-hair of page.js."""
    drawn = [Series(s.label, *svg.downsample(s.xs, s.ys)) for s in series]
    frame = svg.line_frame(drawn, width, height, zero_based)
    points = [
        {"l": s.label, "p": [[x, float(f"{y:.5g}")] for x, y in zip(s.xs, s.ys, strict=True) if y - y == 0]}
        for s in drawn
    ]
    return json.dumps({"w": width, "f": list(frame) if frame else None, "s": points}, separators=(",", ":"))


def _time(history: MetricHistory) -> str:
    shares = stage_shares(history)
    if not shares:
        return ""
    steps = history.curve(STEP_TIME)
    labels = list(shares)[:7]
    layers = [_aligned(history, _timing_name(history, label), steps.steps) for label in labels]
    inside = [layer for label, layer in zip(labels, layers, strict=True) if label not in BETWEEN_STEPS]
    rest = [max(total - sum(values), 0.0) for total, *values in zip(steps.values, *inside, strict=True)]
    legend = "".join(
        f'<li><i class="b{k}"></i>{escape(label)} <b>{100 * shares[label]:.1f} %</b></li>'
        for k, label in enumerate(labels)
    )
    mean = sum(steps.values) / len(steps.values)
    unexplained = 100 * sum(rest) / max(sum(map(sum, layers)) + sum(rest), 1e-12)
    return (
        f'<figure class="card wide"><h3>Seconds per step <small>mean {format_number(mean)} s</small></h3>'
        f"{svg.stacked_chart([*labels, 'other'], steps.steps, [*layers, rest], colors=[*range(len(labels)), 7])}</figure>"
        f'<ul class="legend">{legend}<li><i class="b7"></i>other <b>{unexplained:.1f} %</b></li></ul>'
    )


def _timing_name(history: MetricHistory, label: str) -> str:
    name = f"timing/train/{label}"
    return name if history.curve(name).values else f"{name}/total"


def _aligned(history: MetricHistory, name: str, steps: list[int]) -> list[float]:
    values = dict(zip(*history.curve(name), strict=True))
    return [values.get(step, 0.0) for step in steps]


def _memory(history: MetricHistory) -> str:
    def series(prefix: str) -> list[Series]:
        names = [name for name in history.names(prefix) if not name.endswith("/run")]
        names.sort(key=lambda name: -max(history.curve(name).finite().values, default=0.0))
        return [Series(name.removeprefix(prefix), *history.curve(name)) for name in names[:6]]

    cards = [
        _card(title, "GiB", format_number(max(lines[0].ys)), lines, zero_based=True)
        for title, prefix in (("Peak by phase", "memory/peak_rss_gb/"), ("GPU peak by phase", "memory/peak_gpu_gb/"))
        if (lines := series(prefix))
    ]
    now = history.curve("memory/rss_gb")
    if now.finite().values:
        cards.append(
            _card("After each step", "GiB", format_number(now.values[-1]), [Series("rss", *now)], zero_based=True)
        )
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def _samples(samples: list[Sample]) -> str:
    if not samples:
        return ""
    # inside a script element only "</" and "<!--" could end it: no "<" is left at all
    data = json.dumps(samples, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<div class="controls"><label>step <select id="sample-step"></select></label><button id="prev">‹ earlier</button>'
        '<button id="next">later ›</button><span id="sample-tags"></span></div><div id="sample-list"></div>'
        f'<script type="application/json" id="sample-data">{data}</script><noscript>Samples need JavaScript.</noscript>'
    )


def _configuration(facts: RunFacts) -> str:
    if not facts.config:
        return ""
    parts = []
    if facts.defaults:
        changed = differences(facts.config, facts.defaults)
        rows = "".join(
            f"<tr><td><code>{escape(k)}</code></td><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for k, a, b in changed
        )
        parts.append(f"<p>{len(changed)} values differ from the defaults.</p>")
        if rows:
            parts.append(f"<table><tr><th>key</th><th>value</th><th>default</th></tr>{rows}</table>")
    parts.append(
        f"<details><summary>The whole configuration</summary><pre>{escape(dump_yaml(facts.config))}</pre></details>"
    )
    return "".join(parts)


def differences(config: Mapping[str, object], defaults: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """(key, value, default) of every value that differs; a key that only one side has shows a dash on the other, and is
    left out when it is null there."""
    flat, base = flatten_dict(config, expand_lists=False), flatten_dict(defaults, expand_lists=False)

    def text(side: Mapping[str, object], key: str) -> str:
        value = side.get(key)
        return "–" if key not in side else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    keys = sorted(key for key in flat.keys() | base.keys() if flat.get(key) != base.get(key))
    return [(key, text(flat, key), text(base, key)) for key in keys]


def _environment(environment: Mapping[str, object]) -> str:
    return "".join(f" · {escape(str(key))} {escape(str(value))}" for key, value in environment.items())


def duration(seconds: float) -> str:
    """Text of a length of time: `1 h 02 min`, `5 min 31 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _utc(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
