"""Which curves a report shows, and which of them are flat."""

from collections.abc import Sequence
from typing import NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.history import MetricHistory, validation_word


class Line(NamedTuple):
    """A metric in a panel. `low` and `high` are the metrics that bound its interval, drawn as a band."""

    label: str
    metric: str
    low: str | None = None
    high: str | None = None


class Panel(NamedTuple):
    """A chart: its title, unit and lines. `zero`: the axis begins at 0; `smooth`: a running mean over a faint line."""

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False
    smooth: bool = False
    wide: bool = False

    def spec(self) -> dict[str, Plain]:
        """What chart.js draws."""
        lines = [{k: v for k, v in line._asdict().items() if v is not None} for line in self.lines]
        return {"title": self.title, "zero": self.zero, "smooth": self.smooth, "lines": [*lines]}


class Panels(NamedTuple):
    """The panels of a run: those that move, and those whose every line has one value throughout."""

    moving: list[Panel]
    flat: list[Panel]


_LOW, _HIGH = "validation/accuracy_ci95_low", "validation/accuracy_ci95_high"
_PANELS = (
    Panel("Reward", "", [Line("reward", "train/reward")], smooth=True, wide=True),
    Panel("Validation", "", [Line("", "validation/accuracy", _LOW, _HIGH), Line("pass@k", "validation/pass_k")]),
    Panel("Loss", "", [Line("loss", "train/loss")], smooth=True),
    Panel("Gradient norm", "", [Line("grad_norm", "train/grad_norm")], zero=True, smooth=True),
    Panel("Entropy", "nats per token", [Line("approx_entropy", "train/approx_entropy")], zero=True),
    Panel(
        "Response length",
        "tokens",
        [Line("mean", "train/mean_gen_tokens_per_sample"), Line("longest", "train/max_gen_tokens_per_sample")],
        zero=True,
    ),
    Panel("Cut off at the length limit", "share", [Line("truncation_rate", "train/truncation_rate")], zero=True),
    Panel(
        "Groups with equal rewards",
        "%",
        [
            Line("all", "train/groups/pct_equal"),
            Line("best", "train/groups/pct_equal_best"),
            Line("worst", "train/groups/pct_equal_worst"),
        ],
        zero=True,
    ),
    Panel("KL to the reference", "per token", [Line("kl_penalty", "train/kl_penalty")]),
    Panel(
        "Probability ratio",
        "",
        [
            Line("mean", "train/probs_ratio"),
            Line("lowest", "train/probs_ratio_min"),
            Line("highest", "train/probs_ratio_max"),
        ],
    ),
    Panel("Learning rate", "", [Line("lr", "train/lr")], zero=True),
    Panel(
        "Speed",
        "tokens per second",
        [Line("whole step", "performance/tokens_per_sec"), Line("generation", "performance/generation_tokens_per_sec")],
        zero=True,
    ),
    Panel("token_mult_prob_error", "1 is exact", [Line("token_mult_prob_error", "train/token_mult_prob_error")]),
    Panel("Value loss", "", [Line("critic/loss", "train/critic/loss")], zero=True),
    Panel("Explained variance", "of the value model", [Line("explained_var", "train/critic/explained_var")]),
    Panel("Memory after each step", "GiB", [Line("rss", "memory/rss_gb")], zero=True),
)


def panels_of(histories: Sequence[MetricHistory]) -> Panels:
    """The panels that any of the runs has values for. A panel is flat when every line of it has one value in all runs."""
    result = Panels([], [])
    for panel in _PANELS:
        lines = [line for line in panel.lines if any(h.curve(line.metric).finite().values for h in histories)]
        if not lines:
            continue
        if panel.title == "Validation":
            word = validation_word(*histories)
            lines = [line._replace(label=line.label or word) for line in lines]
            panel = panel._replace(title=f"Validation {word}")
        is_flat = all(_is_flat([h.curve(line.metric).finite().values for h in histories]) for line in lines)
        (result.flat if is_flat else result.moving).append(panel._replace(lines=lines))
    return result


def _is_flat(curves: Sequence[Sequence[float]]) -> bool:
    values = [value for curve in curves for value in curve]
    return len(set(values)) <= 1 and max(map(len, curves)) > 1
