"""The interface of logging backends, and the normalisation of metric names and values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.files.yaml_text import Plain

Metrics = Mapping[str, object]


class LoggerInterface(ABC):
    """The base class of destinations of metrics. A run's `Logger` calls only the six methods below.

    Steps count from 1 and never decrease, except after `truncate_after`. If a tracker (such as W&B) raises an
    exception, the run continues with one warning. An exception of a backend that writes the run's own files ends the
    run, unless the disk is full."""

    @abstractmethod
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Log `prefix/name` for every entry. Values are numbers, or strings and lists, which a backend may ignore.
        `step_metric` names an entry that is the x axis instead of `step`; `step_finished`: this is the step's last
        call."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the configuration, as nested plain values without its secrets. Called once, before the first step."""

    @abstractmethod
    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log the distribution of `histogram`, a list of values that may contain non-finite ones."""

    def flush(self) -> None:
        """Write everything logged so far to disk, before a checkpoint is published. By default nothing is buffered."""

    def truncate_after(self, step: int) -> None:
        """Remove entries of steps after `step`, before a resumed run's first step. By default they stay."""

    def finish(self) -> None:
        """Close the backend. Called at the end of the run, possibly twice. By default there is nothing to close."""


def prefixed(metrics: Metrics, prefix: str, step_metric: str | None) -> dict[str, object]:
    """Return the metrics with their names changed to `prefix/name`. The entry named by `step_metric` keeps its name."""
    if not prefix:
        return dict(metrics)
    return {name if name == step_metric else f"{prefix}/{name}": value for name, value in metrics.items()}


def scalar_of(value: object) -> int | float | bool | str | None:
    """Return a number, a string, or the element of a one-element array as a Python scalar; None for everything else."""
    if not isinstance(value, (int, float, bool, str)):
        value = to_plain(value) if hasattr(value, "tolist") else None
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value if isinstance(value, (int, float, bool, str)) else None


def flatten_dict(d: Mapping[str, object], sep: str = ".", expand_lists: bool = True) -> dict[str, object]:
    """Return a flat mapping with keys joined by `sep`: `{"a": {"b": [1, 2]}}` becomes `{"a.b.0": 1, "a.b.1": 2}`.
    Without `expand_lists`, lists remain values."""
    flat: dict[str, object] = {}

    def walk(value: object, key: str) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(item, f"{key}{sep}{name}" if key else str(name))
        elif isinstance(value, list) and expand_lists:
            for index, item in enumerate(value):
                walk(item, f"{key}{sep}{index}")
        else:
            flat[key] = value

    walk(d, "")
    return flat
