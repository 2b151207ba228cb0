"""Experiment trackers: wandb, mlflow, swanlab and trackio. A tracker's Python package is imported only if its backend
is enabled.
"""

import importlib
import os
import re
import secrets
import socket
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.logger import LoggerConfig, MLflowConfig, SwanlabConfig, TrackioConfig, WandbConfig
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import LoggerInterface, flatten_dict, prefixed, scalar_of

if TYPE_CHECKING:
    from mlflow import ActiveRun

_LONGEST_NAME = 250
_LONGEST_STEM = 220  # the maximum length of a name to which a suffix is appended
_LONGEST_CUT = 500  # MLflow may truncate parameter values that are longer


def import_tracker(package: str) -> ModuleType:
    """Import a tracker's Python package. If that fails, raise ValueError with the configuration key and the install
    command."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"logger.{package}_enabled=true, but the package {package} cannot be imported ({error}): "
            f"run `pip install {package}`, or set logger.{package}_enabled=false"
        ) from error


class _RunFile:
    """A file in the backend's log folder that holds the id of the tracker's run, so that a resumed run continues it."""

    def __init__(self, log_dir: str | None) -> None:
        self._path = Path(log_dir) / "run_id.txt" if log_dir and Path(log_dir).is_dir() else None

    def read(self) -> str | None:
        return self._path.read_text().strip() if self._path is not None and self._path.exists() else None

    def write(self, run: str) -> None:
        if self._path is not None:
            self._path.write_text(str(run))


class TrackerLogger(LoggerInterface):
    """A backend that logs metrics through an experiment tracker's Python package. A subclass that logs only numbers
    overrides `send`.

    Attributes:
        refused: a regular expression for the characters that the tracker does not allow in metric names.
        section: the class of the tracker's configuration section.
        variables: key -> environment variable that the Python package reads. A key set by the user overrides its
            variable, which overrides the default of `section`."""

    package = staticmethod(import_tracker)
    refused = r"[\ud800-\udfff]"
    section: type[Section]
    variables: Mapping[str, str] = {}

    @classmethod
    def given(cls, cfg: Section | Mapping[str, object] | None) -> dict[str, Plain]:
        """Return the keys of `cfg` that have a value, except keys with their default value whose environment variable
        is set."""
        defaults = {key: field.default for key, field in cls.section.model_fields.items()}
        return {
            key: value
            for key, value in to_plain(cfg or {}).items()
            if value is not None and not (value == defaults.get(key) and os.getenv(cls.variables.get(key, "")))
        }

    @abstractmethod
    def restart(self, step: int) -> None:
        """Start a new tracker run, because the current one has metrics of steps after `step`, which no tracker can
        remove. The new run records the name of the current one if the tracker can store it.
        """

    def accepted(self, name: str) -> str:
        """Return a metric name with `_` in place of each character that the tracker does not allow, truncated to the
        maximum length.
        """
        return re.sub(self.refused, "_", name)[:_LONGEST_NAME]

    def send(self, row: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        self.send(self.numbers(metrics, prefix, step_metric), step)

    def numbers(self, metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, float]:
        """Return the metrics that are numbers, by the names under which they are logged."""
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        scalars = {self.accepted(name): scalar_of(value) for name, value in flat.items()}
        return {name: value for name, value in scalars.items() if value is not None and not isinstance(value, str)}

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a summary of the values (mean, p50, p90, max), because the tracker has no histograms."""
        self.send(self.summary(name, to_plain(histogram)), step)

    def summary(self, name: str, values: object) -> dict[str, float]:
        """Return `summarize_list` of the values of metric `name`, under the names that are logged."""
        numbers = summarize_list(values) if isinstance(values, list) else {}
        return {self.accepted(f"{name}/{key}"): number for key, number in numbers.items()}


class WandbLogger(TrackerLogger):
    """A backend that logs to Weights & Biases. A run that resumes in the same folder continues the same W&B run."""

    section = WandbConfig
    variables = {
        "project": "WANDB_PROJECT", "name": "WANDB_NAME", "entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP",
        "job_type": "WANDB_JOB_TYPE", "tags": "WANDB_TAGS", "notes": "WANDB_NOTES", "mode": "WANDB_MODE",
        "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME",
    }  # fmt: skip

    def __init__(self, cfg: WandbConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """Start the W&B run. `cfg` is the section `logger.wandb`, whose keys are arguments of `wandb.init` (project,
        name, entity, tags, ...). Raise ValueError if wandb is not installed or does not start.
        """
        self._wandb, self._file, self._options = self.package("wandb"), _RunFile(log_dir), self.given(cfg)
        self._options["dir"] = log_dir
        self._options.pop("log_nemo_gym_full_result_tables", None)
        known = self._file.read()
        is_given = "id" in self._options or os.getenv("WANDB_RUN_ID")
        self._start({"id": known, "resume": "allow"} if known and not is_given else {})

    def _start(self, more: dict[str, Plain]) -> None:
        try:
            self.run = self._wandb.init(**self._options | more)
        except Exception as error:  # the error classes differ between versions
            raise ValueError(
                f"logger.wandb_enabled=true, but wandb does not start ({error}): run `wandb login` or set WANDB_API_KEY; "
                "without an account set WANDB_MODE=offline, or logger.wandb_enabled=false"
            ) from error
        self._file.write(self.run.id)

    def restart(self, step: int) -> None:
        old = self.run.id
        self.run.finish()
        self._start({"id": secrets.token_hex(4), "resume": "never", "config": {"resumed_from": f"{old}, step {step}"}})

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Set the x axis `step_metric` for the metrics that match `name` (for example `ray/*`)."""
        self.run.define_metric(name, step_metric=step_metric)

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Add metrics to the step's row. W&B sends the row if `step_finished` is set, or when a later step begins."""
        row = {self.accepted(name): to_plain(value) for name, value in prefixed(metrics, prefix, step_metric).items()}
        if step_metric and (step_metric in metrics or step_metric in row):
            self.run.log(row, commit=False)
        elif step_finished:
            self.run.log(row, step=step, commit=True)
        else:
            self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        self.run.config.update(to_plain(params), allow_val_change=True)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a W&B histogram of the finite values. If all are equal, log the value itself, because it cannot be
        binned.
        """
        values = np.asarray(to_plain(histogram), dtype=np.float64).ravel()
        values = values[np.isfinite(values)]
        if values.size:
            same = values.min() == values.max()
            self.run.log({self.accepted(name): float(values[0]) if same else self._wandb.Histogram(values)}, step=step)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


class MLflowLogger(TrackerLogger):
    """A backend that logs to MLflow, which takes only scalars: a list is logged as its mean, p50, p90 and max."""

    refused = r"[^/\w.\- :]"  # as in mlflow.utils.validation
    section = MLflowConfig
    variables = {
        "experiment_name": "MLFLOW_EXPERIMENT_NAME",
        "run_name": "MLFLOW_RUN_NAME",
        "tracking_uri": "MLFLOW_TRACKING_URI",
        "run_id": "MLFLOW_RUN_ID",
    }

    def __init__(self, cfg: MLflowConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """Start or continue the MLflow run. `cfg` is the section `logger.mlflow` with experiment_name, run_name,
        run_id, tracking_uri and artifact_location. Raise ValueError if MLflow is not installed or its server does not
        answer.
        """
        self._mlflow, self._file, options = self.package("mlflow"), _RunFile(log_dir), self.options(cfg)
        self._run_name = options.get("run_name")
        if uri := options.get("tracking_uri"):
            check_server(uri, _MLFLOW_ADDRESS)
            self._mlflow.set_tracking_uri(uri)
        if self._mlflow.active_run() is not None:
            self._mlflow.end_run()
        if known := options.get("run_id") or self._file.read():
            run = self._mlflow.start_run(run_id=known)
        else:
            self._choose_experiment(options.get("experiment_name"), options.get("artifact_location") or log_dir)
            run = self._mlflow.start_run(run_name=self._run_name)
        self._uri = self._mlflow.get_tracking_uri()
        self._use(run, step=0 if known else None)

    @contextmanager
    def _own_server(self) -> Iterator[ModuleType]:
        """Yield MLflow with the tracking URI of the run. User code may have set another one, which is kept."""
        theirs = self._mlflow.get_tracking_uri()
        if theirs == self._uri:
            yield self._mlflow
            return
        self._mlflow.set_tracking_uri(self._uri)
        try:
            yield self._mlflow
        finally:
            self._mlflow.set_tracking_uri(theirs)

    def _use(self, run: "ActiveRun", step: int | None) -> None:
        """Log into this MLflow run from now on. `step` is the step from which it resumes, or None if it is new."""
        self.run_id, self._experiment, self._resumed_step = run.info.run_id, run.info.experiment_id, step
        self._file.write(self.run_id)

    def truncate_after(self, step: int) -> None:
        """Record the step from which the run resumes, for `log_hyperparams`."""
        self._resumed_step = step

    def restart(self, step: int) -> None:
        self._mlflow.end_run()
        tags = {"resumed_from": f"{self.run_id}, step {step}"}
        self._use(self._mlflow.start_run(run_name=self._run_name, experiment_id=self._experiment, tags=tags), step=None)

    def accepted(self, name: str) -> str:
        """Return a metric name that MLflow allows. Special characters become `_`, and so do the parts of a path that
        are empty, `.` or `..`.
        """
        parts = [part if part.strip(".") else part.replace(".", "_") or "_" for part in name.split("/")]
        return super().accepted("/".join(parts)).rstrip("/")

    @classmethod
    def options(cls, cfg: MLflowConfig | Mapping[str, object] | None) -> dict[str, str]:
        """Return the MLflow settings in use: the given keys, and MLflow's environment variables for the other keys."""
        return {key: value for key, name in cls.variables.items() if (value := os.getenv(name))} | cls.given(cfg)

    def _choose_experiment(self, name: str | None, artifacts: str | None) -> None:
        if name is None:
            return
        if self._mlflow.get_experiment_by_name(name) is None:
            self._mlflow.create_experiment(name=name, artifact_location=artifacts)
        self._mlflow.set_experiment(name)

    def numbers(self, metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, float]:
        """Return the metrics that are numbers, and a summary of each list of numbers, by the names under which they are
        logged."""
        row: dict[str, float] = {}
        for name, value in flatten_dict(prefixed(metrics, prefix, None), sep="/", expand_lists=False).items():
            number = scalar_of(value)
            if isinstance(value, list) and len(value) != 1:
                row |= self.summary(name, value)
            elif number is not None and not isinstance(number, str):
                row[self.accepted(name)] = float(number)
        return row

    def send(self, row: dict[str, float], step: int) -> None:
        if row:
            with self._own_server() as mlflow:
                mlflow.log_metrics(row, step=step, run_id=self.run_id)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the flattened configuration as parameters. MLflow does not allow a parameter to change: if a run resumes
        from step N with another value, it logs that value as the parameter `NAME.from_step_N`.
        """
        with self._own_server() as mlflow:
            known = {} if self._resumed_step is None else mlflow.get_run(self.run_id).data.params
            if new := self._new_params(params, known):
                mlflow.log_params(new, run_id=self.run_id)

    def _new_params(self, params: Mapping[str, Plain], known: Mapping[str, str]) -> dict[str, object]:
        """Return the parameters to log. `known` are those that the run already has."""
        changes = _latest_changes(known)
        new: dict[str, object] = {}
        for name, value in flatten_dict(to_plain(params)).items():
            name = self.accepted(name)
            stem, text = name[:_LONGEST_STEM], str(value)
            (step, number), latest = changes.get(stem, ((0, 0), known.get(name)))
            if latest is None:
                new[name] = value
            elif latest != text and not (len(latest) >= _LONGEST_CUT and text.startswith(latest)):
                again = f".{number + 1}" if number and step == self._resumed_step else ""
                new[f"{stem}.from_step_{self._resumed_step}{again}"] = value
        return new

    def finish(self) -> None:
        with self._own_server() as mlflow:
            mlflow.end_run()


def _latest_changes(params: Mapping[str, str]) -> dict[str, tuple[tuple[int, int], str]]:
    """Return a mapping from NAME to ((N, M), value) for each MLflow parameter NAME with changes. The value is that of
    the last parameter `NAME.from_step_N.M`, or `NAME.from_step_N` (M = 1)."""
    latest: dict[str, tuple[tuple[int, int], str]] = {}
    for name, value in params.items():
        if found := re.fullmatch(r"(.+)\.from_step_(\d+)(?:\.(\d+))?", name, re.DOTALL):
            change = (int(found[2]), int(found[3] or 1)), value
            latest[found[1]] = max(latest.get(found[1], change), change)
    return latest


_MLFLOW_ADDRESS = "logger.mlflow.tracking_uri or MLFLOW_TRACKING_URI"


def check_server(uri: str, what: str) -> None:
    """Raise ValueError if no server answers at the address of a tracker within three seconds. Folders, databases and
    servers behind a proxy are not checked.
    """
    address = urlsplit(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    is_here = address.hostname in ("localhost", "::1") or address.hostname.startswith("127.")
    if not is_here and address.scheme in getproxies():
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=3).close()
    except OSError as error:
        raise ValueError(
            f"{what}: no server answers at {address.scheme}://{address.hostname}:{port} ({error}): start it, or give "
            "another address or a folder, or switch the tracker off"
        ) from error


class SwanlabLogger(TrackerLogger):
    """A backend that logs to SwanLab. A run that resumes in the same folder continues the same SwanLab run."""

    section = SwanlabConfig
    variables = {
        "project": "SWANLAB_PROJ_NAME",
        "name": "SWANLAB_EXP_NAME",
        "workspace": "SWANLAB_WORKSPACE",
        "mode": "SWANLAB_MODE",
    }

    def __init__(self, cfg: SwanlabConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """Start the SwanLab run. `cfg` is the section `logger.swanlab`, whose keys are arguments of `swanlab.init`
        (project, name, ...).
        """
        self._swanlab, self._file = self.package("swanlab"), _RunFile(log_dir)
        self._options = self.given(cfg) | {"logdir": log_dir}
        known = self._file.read()
        self._start({"id": known, "resume": "allow"} if known and not os.getenv("SWANLAB_RUN_ID") else {})

    def _start(self, more: dict[str, Plain]) -> None:
        self.run = self._swanlab.init(**self._options | more)
        self._file.write(self.run.id)

    def restart(self, step: int) -> None:
        self._swanlab.finish()
        self._start({})

    def send(self, row: dict[str, float], step: int) -> None:
        self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        self.run.config.update(to_plain(params))

    def finish(self) -> None:
        self._swanlab.finish()


class TrackioLogger(TrackerLogger):
    """A backend that logs to Trackio's local database. A run that resumes in the same folder continues the same Trackio
    run.
    """

    section = TrackioConfig

    def __init__(self, cfg: TrackioConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """Start the Trackio run. `cfg` is the section `logger.trackio`, whose keys are arguments of `trackio.init`
        (project, name, space_id, ...).
        """
        self._trackio, self._file = self.package("trackio"), _RunFile(log_dir)
        self._options = {"project": "nemo-rl-cpp"} | self.given(cfg)
        known = self._file.read()
        self._start({"name": known, "resume": "allow"} if known else {})

    def _start(self, more: dict[str, Plain]) -> None:
        self.run = self._trackio.init(**self._options | more)
        self._file.write(self.run.name)

    def restart(self, step: int) -> None:
        name = f"{self.run.name}-from-step-{step}"
        self._trackio.finish()
        self._start({"name": name, "resume": "never"})

    def send(self, row: dict[str, float], step: int) -> None:
        self._trackio.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        self.run.config.update(to_plain(params))

    def finish(self) -> None:
        self._trackio.finish()


def check_trackers(cfg: LoggerConfig) -> None:
    """Raise ValueError if the server of an enabled tracker does not answer. Call this before a model is loaded."""
    if cfg.is_enabled("mlflow") and (uri := MLflowLogger.options(cfg.mlflow).get("tracking_uri")):
        check_server(uri, _MLFLOW_ADDRESS)


def summarize_list(values: Iterable[object]) -> dict[str, float]:
    """Return `mean`, `p50`, `p90` and `max` of the numbers among the values, or {} if there are none."""
    kinds = (int, float, np.integer, np.floating)
    numbers = np.asarray(
        [value for value in values if isinstance(value, kinds) and not isinstance(value, bool)], dtype=float
    )
    if not numbers.size:
        return {}
    p50, p90 = np.percentile(numbers, [50, 90])
    return {"mean": float(numbers.mean()), "p50": float(p50), "p90": float(p90), "max": float(numbers.max())}
