"""Experiment trackers: wandb, mlflow, swanlab and trackio. A tracker's package is imported only if it is enabled."""

import importlib
import os
import re
import secrets
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from nemo_rl_cpp.loggers.interface import LoggerInterface, Metrics, flatten_dict, prefixed, scalar_of

if TYPE_CHECKING:
    from mlflow import ActiveRun

_LONGEST_NAME = 250
_LONGEST_STEM = 220  # the maximum length of a name to which a suffix is appended
_LONGEST_CUT = 500  # MLflow may truncate parameter values that are longer


class TrackerLogger(LoggerInterface):
    """A backend that logs through an experiment tracker's package. A subclass whose tracker logs only numbers overrides
    `send`; others override `log_metrics`."""

    name: str  # the name of the Python package
    refused = r"[\ud800-\udfff]"  # matches the characters that the tracker does not allow in metric names
    section: type[Section]  # the class of the tracker's configuration section
    # key -> environment variable that the Python package reads; it overrides the default, and the user's key overrides it
    variables: Mapping[str, str] = {}

    def __init__(self, log_dir: str) -> None:
        """Import the tracker's package, and read the id of the run that a resumed run continues from `log_dir`."""
        self._tracker = importlib.import_module(self.name)
        self._id_file = Path(log_dir) / "run_id.txt"
        self._known = self._id_file.read_text().strip() if self._id_file.exists() else None

    @classmethod
    def given(cls, cfg: Section | Mapping[str, object] | None) -> dict[str, Plain]:
        """Return {key: value} for the keys of `cfg` that have a value. A key with its default is omitted if the
        tracker's environment variable for it is set."""
        defaults = {key: field.default for key, field in cls.section.model_fields.items()}
        return {
            key: value
            for key, value in to_plain(cfg or {}).items()
            if value is not None and not (value == defaults.get(key) and os.getenv(cls.variables.get(key, "")))
        }

    @abstractmethod
    def restart(self, step: int) -> None:
        """Start a new run of the tracker, which records the name of the current one. Called if training resumes from
        `step` and the current tracker run has later steps, which no tracker can remove."""

    def accepted(self, name: str) -> str:
        """Return a metric's name in the form that the tracker allows: cut to length, with forbidden characters as
        `_`."""
        return re.sub(self.refused, "_", name)[:_LONGEST_NAME]

    @abstractmethod
    def send(self, row: dict[str, float], step: int) -> None:
        """Log the numbers `row`, {name in the tracker: value}, at `step`."""

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        self.send(self.numbers(metrics, prefix, step_metric), step)

    def numbers(self, metrics: Metrics, prefix: str, step_metric: str | None) -> dict[str, float]:
        """Return {name in the tracker: value} of the metrics that are numbers."""
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        scalars = {self.accepted(name): scalar_of(value) for name, value in flat.items()}
        return {name: value for name, value in scalars.items() if value is not None and not isinstance(value, str)}

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log a summary of the values, because the tracker has no histograms."""
        self.send(self.summary(name, to_plain(histogram)), step)

    def summary(self, name: str, values: Sequence[object]) -> dict[str, float]:
        """Return {name in the tracker: number} of mean, p50, p90 and max of the numbers in `values`; {} without any."""
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if not numbers:
            return {}
        p50, p90 = np.percentile(numbers, [50, 90])
        found = {"mean": np.mean(numbers), "p50": p50, "p90": p90, "max": max(numbers)}
        return {self.accepted(f"{name}/{key}"): float(number) for key, number in found.items()}


class InitTracker(TrackerLogger):
    """The base class for trackers whose package starts a run with `init(...)`, and continues it if a run resumes."""

    id_key = "id"  # the argument of `init`, and the attribute of its result, that identify a run
    folder_key = ""  # the argument of `init` for the folder of the tracker's files, if there is one

    def __init__(self, cfg: Section | Mapping[str, object] | None, log_dir: str) -> None:
        """Start the tracker's run. The keys of `cfg`, the section `logger.NAME`, are arguments of `init`."""
        super().__init__(log_dir)
        self._options = self.given(cfg) | ({self.folder_key: log_dir} if self.folder_key else {})
        is_given = self.id_key == "id" and ("id" in self._options or os.getenv(self.variables["id"]))
        self._start({self.id_key: self._known, "resume": "allow"} if self._known and not is_given else {})

    def _start(self, more: dict[str, Plain]) -> None:
        self.run = self._tracker.init(**self._options | more)
        self._id_file.write_text(str(getattr(self.run, self.id_key)))

    def send(self, row: dict[str, float], step: int) -> None:
        self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        self.run.config.update(to_plain(params))

    def finish(self) -> None:
        self._tracker.finish()


class WandbLogger(InitTracker):
    """A backend that logs to Weights & Biases."""

    name, section, folder_key = "wandb", WandbConfig, "dir"
    variables = {
        "project": "WANDB_PROJECT", "name": "WANDB_NAME", "entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP",
        "job_type": "WANDB_JOB_TYPE", "tags": "WANDB_TAGS", "notes": "WANDB_NOTES", "mode": "WANDB_MODE",
        "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME",
    }  # fmt: skip

    def _start(self, more: dict[str, Plain]) -> None:
        self._options.pop("log_nemo_gym_full_result_tables", None)
        try:
            super()._start(more)
        except Exception as error:  # the error classes differ between versions
            raise ValueError(
                f"logger.wandb_enabled=true, but wandb does not start ({error}): run `wandb login` or set WANDB_API_KEY; "
                "without an account set WANDB_MODE=offline, or logger.wandb_enabled=false"
            ) from error

    def restart(self, step: int) -> None:
        old = self.run.id
        self.run.finish()
        self._start({"id": secrets.token_hex(4), "resume": "never", "config": {"resumed_from": f"{old}, step {step}"}})

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Add `metrics`, under the names `prefix/name`, to the row of `step` in W&B. Metrics that contain
        `step_metric`, an x axis of their own, are added to the current row instead. W&B sends the row if
        `step_finished`, or when a later step begins."""
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
        """Log a histogram of the finite values; if they are all equal, which leaves no range, their value."""
        values = np.asarray(to_plain(histogram), dtype=np.float64).ravel()
        values = values[np.isfinite(values)]
        if values.size:
            is_constant = values.min() == values.max()
            value = float(values[0]) if is_constant else self._tracker.Histogram(values)
            self.run.log({self.accepted(name): value}, step=step)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


class MLflowLogger(TrackerLogger):
    """A backend that logs to MLflow, which takes only scalars: a list is logged as its mean, p50, p90 and max."""

    name, section = "mlflow", MLflowConfig
    refused = r"[^/\w.\- :]"  # as in mlflow.utils.validation
    variables = {
        "experiment_name": "MLFLOW_EXPERIMENT_NAME",
        "run_name": "MLFLOW_RUN_NAME",
        "tracking_uri": "MLFLOW_TRACKING_URI",
        "run_id": "MLFLOW_RUN_ID",
    }

    def __init__(self, cfg: MLflowConfig | Mapping[str, object] | None, log_dir: str) -> None:
        """Start the MLflow run, or continue the one whose id `cfg` or the log folder holds."""
        super().__init__(log_dir)
        options = self.options(cfg)
        self._run_name = options.get("run_name")
        if uri := options.get("tracking_uri"):
            self._tracker.set_tracking_uri(uri)
        if self._tracker.active_run() is not None:
            self._tracker.end_run()
        if known := options.get("run_id") or self._known:
            run = self._tracker.start_run(run_id=known)
        else:
            if (experiment := options.get("experiment_name")) is not None:
                if self._tracker.get_experiment_by_name(experiment) is None:
                    artifacts = options.get("artifact_location") or log_dir
                    self._tracker.create_experiment(name=experiment, artifact_location=artifacts)
                self._tracker.set_experiment(experiment)
            run = self._tracker.start_run(run_name=self._run_name)
        self._uri = self._tracker.get_tracking_uri()
        self._use(run, step=0 if known else None)

    @contextmanager
    def _own_server(self) -> Iterator[ModuleType]:
        """A context manager that yields the module `mlflow`, set to this run's tracking URI, and at the end restores
        the URI that user code had set."""
        theirs = self._tracker.get_tracking_uri()
        if theirs == self._uri:
            yield self._tracker
            return
        self._tracker.set_tracking_uri(self._uri)
        try:
            yield self._tracker
        finally:
            self._tracker.set_tracking_uri(theirs)

    def _use(self, run: "ActiveRun", step: int | None) -> None:
        """Log to `run` from now on. `step` is the step from which the training run resumes, or None if the MLflow run
        is new."""
        self.run_id, self._experiment, self._resumed_step = run.info.run_id, run.info.experiment_id, step
        self._id_file.write_text(str(self.run_id))

    def truncate_after(self, step: int) -> None:
        """Remember `step`, from which the run resumes, for `log_hyperparams`. Nothing is removed from the tracker here."""
        self._resumed_step = step

    def restart(self, step: int) -> None:
        self._tracker.end_run()
        tags = {"resumed_from": f"{self.run_id}, step {step}"}
        run = self._tracker.start_run(run_name=self._run_name, experiment_id=self._experiment, tags=tags)
        self._use(run, step=None)

    def accepted(self, name: str) -> str:
        """Return a metric's name in the form that MLflow allows, with `_` for special characters and for empty or
        dotted parts."""
        parts = [part if part.strip(".") else part.replace(".", "_") or "_" for part in name.split("/")]
        return super().accepted("/".join(parts)).rstrip("/")

    @classmethod
    def options(cls, cfg: MLflowConfig | Mapping[str, object] | None) -> dict[str, str]:
        """Return the MLflow settings in use: those of the section `cfg`, else of MLflow's environment variables."""
        return {key: value for key, name in cls.variables.items() if (value := os.getenv(name))} | cls.given(cfg)

    def numbers(self, metrics: Metrics, prefix: str, step_metric: str | None) -> dict[str, float]:
        """Return {name in MLflow: number}: the metrics that are numbers, and mean, p50, p90 and max of each list of
        numbers. `prefix` is that of `log_metrics`; `step_metric` is ignored."""
        row: dict[str, float] = {}
        for name, value in flatten_dict(prefixed(metrics, prefix, None), sep="/", expand_lists=False).items():
            number = scalar_of(value)
            if isinstance(value, list) and len(value) != 1:
                row |= self.summary(name, to_plain(value))
            elif number is not None and not isinstance(number, str):
                row[self.accepted(name)] = float(number)
        return row

    def send(self, row: dict[str, float], step: int) -> None:
        if row:
            with self._own_server() as mlflow:
                mlflow.log_metrics(row, step=step, run_id=self.run_id)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the flattened configuration as parameters, which MLflow does not let change: another value of a run that
        resumes from step N is the parameter `NAME.from_step_N`."""
        with self._own_server() as mlflow:
            known = {} if self._resumed_step is None else mlflow.get_run(self.run_id).data.params
            if new := self._new_params(params, known):
                mlflow.log_params(new, run_id=self.run_id)

    def _new_params(self, params: Mapping[str, Plain], known: Mapping[str, str]) -> dict[str, object]:
        """Return the parameters to log: new ones under their names, changed ones (of `known`) as `NAME.from_step_N`."""
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
    """Return {NAME: ((N, M), value)}: the last change of each parameter, the M-th at step N, from the names
    `NAME.from_step_N` (M = 1) and `NAME.from_step_N.M`."""
    latest: dict[str, tuple[tuple[int, int], str]] = {}
    for name, value in params.items():
        if found := re.fullmatch(r"(.+)\.from_step_(\d+)(?:\.(\d+))?", name, re.DOTALL):
            change = (int(found[2]), int(found[3] or 1)), value
            latest[found[1]] = max(latest.get(found[1], change), change)
    return latest


def check_trackers(cfg: LoggerConfig) -> None:
    """Raise ValueError if no MLflow server answers within three seconds. Folders and proxies are not checked."""
    uri = MLflowLogger.options(cfg.mlflow).get("tracking_uri") if cfg.mlflow_enabled else None
    address = urlsplit(uri or "")
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
            "logger.mlflow.tracking_uri or MLFLOW_TRACKING_URI: no server answers at "
            f"{address.scheme}://{address.hostname}:{port} ({error}): start it, or give another address or a folder, or "
            "switch the tracker off"
        ) from error


class SwanlabLogger(InitTracker):
    """A backend that logs to SwanLab."""

    name, section, folder_key = "swanlab", SwanlabConfig, "logdir"
    variables = {
        "project": "SWANLAB_PROJ_NAME", "name": "SWANLAB_EXP_NAME", "workspace": "SWANLAB_WORKSPACE", "mode": "SWANLAB_MODE",
        "id": "SWANLAB_RUN_ID",
    }  # fmt: skip

    def restart(self, step: int) -> None:
        self._tracker.finish()
        self._start({})


class TrackioLogger(InitTracker):
    """A backend that logs to Trackio's local database. Trackio identifies a run by its name."""

    name, section, id_key = "trackio", TrackioConfig, "name"

    def restart(self, step: int) -> None:
        name = f"{self.run.name}-from-step-{step}"
        self._tracker.finish()
        self._start({"name": name, "resume": "never"})
