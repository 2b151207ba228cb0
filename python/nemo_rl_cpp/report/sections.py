"""Sections of the report page that show where time, memory and settings go."""

import json
import math
from collections.abc import Mapping, Sequence

from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.shell import parts

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
    """Seconds of a step on average."""
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
