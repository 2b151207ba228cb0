"""The interface of logging backends, and the normalisation of metric names and values."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.files.yaml_text import Plain


class LoggerBackend(Protocol):
    """A destination of metrics. The run's `Logger` calls these six methods only.

    Steps count from 1 and never decrease, except after `truncate_after`. An exception of a backend that does not write
    the run's files is shown once as a warning, and the run continues without the backend.
    """

    @abstractmethod
    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Log `prefix/name` for every entry: numbers, and strings or lists, which a backend may ignore. Called several
        times per step. `step_metric` names an entry that is the x axis instead of `step`. `step_finished` marks the
        last call of a step."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the configuration as nested plain values, without its secrets. Called once, before the first step."""

    @abstractmethod
    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a distribution of values, which need not be finite."""

    def flush(self) -> None:
        """Write everything logged so far to its file. Called before a checkpoint is published."""

    def truncate_after(self, step: int) -> None:
        """Remove all entries of later steps if the backend can. Called before the first step of a resumed run."""

    def finish(self) -> None:
        """Close the backend. Called at the end, possibly twice."""


class LoggerInterface(LoggerBackend):
    """The base class of logger backends, under NeMo RL's name: a `LoggerBackend` that writes no files."""

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    def truncate_after(self, step: int) -> None:
        """Do nothing: data sent to a tracker is kept."""

    def finish(self) -> None:
        """Do nothing: there is nothing to close."""


def prefixed(metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, object]:
    """Return the metrics renamed to `prefix/name`; the entry named by `step_metric` keeps its name."""
    if not prefix:
        return dict(metrics)
    return {name if name == step_metric else f"{prefix}/{name}": value for name, value in metrics.items()}


def scalar_of(value: object) -> int | float | bool | str | None:
    """Return a Python scalar for a number, a string, or a one-element array or tensor; None for everything else."""
    if not isinstance(value, (int, float, bool, str)):
        value = to_plain(value) if hasattr(value, "tolist") else None
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value if isinstance(value, (int, float, bool, str)) else None


def flatten_dict(d: Mapping[str, object], sep: str = ".", expand_lists: bool = True) -> dict[str, object]:
    """Return a flat mapping with keys joined by `sep`: `{"a": {"b": [1, 2]}}` gives `{"a.b.0": 1, "a.b.1": 2}`. With
    `expand_lists=False` lists stay unchanged under their key."""
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
