"""What every logging backend offers, and how metric names and values are brought to one form."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.files.yaml_text import Plain


class LoggerBackend(Protocol):
    """What the run's `Logger` asks of one place that metrics go to: these six methods and no others.

    Steps count from 1 and do not go back, except after `truncate_after`. An exception of a back end that is no file of the run
    is shown once as a warning, and the run goes on without it.
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
        """Log `prefix/name` for every entry: numbers, and texts or lists that a back end may leave out. Called several
        times a step. `step_metric` names an entry that is the x axis instead of `step`; `step_finished` says that
        nothing more of this step follows."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the configuration as nested plain values, without its secrets; called once, before the first step."""

    @abstractmethod
    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a distribution of values, which need not be finite."""

    def flush(self) -> None:
        """Bring everything logged so far to its file; called before a checkpoint is published."""

    def truncate_after(self, step: int) -> None:
        """Forget everything of later steps, where the back end can; called before the first step of a run that resumes."""

    def finish(self) -> None:
        """Close the back end; called at the end, perhaps twice."""


class LoggerInterface(LoggerBackend):
    """The base class of logger back ends, under NeMo RL's name: a `LoggerBackend` that writes nothing to files."""

    def flush(self) -> None:
        """Do nothing: nothing waits to be written."""

    def truncate_after(self, step: int) -> None:
        """Do nothing: what is logged elsewhere stays."""

    def finish(self) -> None:
        """Do nothing: there is nothing to close."""


def prefixed(metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, object]:
    """Return the metrics under `prefix/name`; the entry that is the step itself keeps its name."""
    if not prefix:
        return dict(metrics)
    return {name if name == step_metric else f"{prefix}/{name}": value for name, value in metrics.items()}


def scalar_of(value: object) -> int | float | bool | str | None:
    """Return a Python scalar for numbers, strings and one-element arrays or tensors; None for everything else."""
    if not isinstance(value, (int, float, bool, str)):
        value = to_plain(value) if hasattr(value, "tolist") else None
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value if isinstance(value, (int, float, bool, str)) else None


def flatten_dict(d: Mapping[str, object], sep: str = ".", expand_lists: bool = True) -> dict[str, object]:
    """Return one level of keys joined by `sep`: `{"a": {"b": [1, 2]}}` gives `{"a.b.0": 1, "a.b.1": 2}`. With
    `expand_lists=False` lists stay whole under their key."""
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
