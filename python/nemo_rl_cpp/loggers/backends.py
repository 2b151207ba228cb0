"""Experiment trackers: wandb, mlflow, swanlab and trackio. Each package is imported only when its backend is enabled."""

import hashlib
import http.client
import importlib
import os
import posixpath
import re
import secrets
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.logger import LoggerConfig, MLflowConfig, SwanlabConfig, TrackioConfig, WandbConfig
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import LoggerInterface, flatten_dict, prefixed, scalar_of

_RUN_ID = "run_id.txt"


def import_tracker(package: str) -> ModuleType:
    """The tracker's package; ValueError that names the key and the command when it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"logger.{package}_enabled=true, but the package {package} cannot be imported ({error}): "
            f"run `pip install {package}`, or set logger.{package}_enabled=false"
        ) from error


class _RunFile:
    """Remembers, in the backend's log folder, which run of the tracker a resumed run goes on with."""

    def __init__(self, log_dir: str | None) -> None:
        self._path = Path(log_dir) / _RUN_ID if log_dir and Path(log_dir).is_dir() else None

    def read(self) -> str | None:
        return self._path.read_text().strip() if self._path is not None and self._path.exists() else None

    def write(self, run: str) -> None:
        if self._path is not None:
            self._path.write_text(str(run))


def check_server(uri: str, what: str) -> None:
    """Raise ValueError when no HTTP server answers at the address of a tracker within three seconds. Any answer will do.

    A folder or database is not asked. A proxy of the environment is asked in the server's place, except for this machine
    and for the hosts of `no_proxy`.
    """
    address = urlsplit(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    place = address.netloc.rpartition("@")[2]  # without a password, which is not printed either
    is_here = address.hostname in ("localhost", "::1") or address.hostname.startswith("127.")
    opener = build_opener(ProxyHandler({})) if is_here else build_opener()
    try:
        opener.open(Request(f"{address.scheme}://{place}{address.path}", method="HEAD"), timeout=3).close()
        return
    except HTTPError as error:
        if error.code not in (502, 503, 504):  # a proxy found no server
            return
        reason: object = error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):
            return  # the server speaks: whether its certificate will do is for the tracker to decide
    raise ValueError(
        f"{what}: no server answers at {address.scheme}://{place}{address.path} ({reason}): start it, or give another "
        "address or a folder, or switch the tracker off"
    )


def accepted_name(name: str, refused: str, longest: int) -> str:
    """Return the name if a tracker takes it, else a similar one: `_` for each character that matches `refused`, for empty
    parts of the path and for `.` and `..`. A digest of the name keeps two replaced names apart, in this run and when it
    resumes."""
    parts = re.sub(refused, "_", name).split("/")
    taken = posixpath.join(*("_" if part in ("", ".", "..") else part for part in parts))
    if taken == name and len(name) <= longest:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{taken[: longest - 9]}_{digest}"


class TrackerLogger(LoggerInterface):
    """A backend that hands everything to the package of a tracker. One that logs numbers alone overrides `send`.

    `refused` and `longest` say which names the tracker takes. `variables` names the environment variables that its package
    reads itself: a key that the user has set wins over its variable, and the variable wins over the default of `section`.
    """

    package = staticmethod(import_tracker)
    refused = r"[\ud800-\udfff]"
    longest = 250
    section: type[Section]
    variables: Mapping[str, str] = {}

    @classmethod
    def given(cls, cfg: Section | Mapping[str, object] | None) -> dict[str, Plain]:
        """Return the keys that have a value, without defaults for which an environment variable of the tracker is set."""
        values = to_plain(cfg or {})
        defaults = {key: field.default for key, field in cls.section.model_fields.items()}
        return {
            key: value
            for key, value in values.items()
            if value is not None
            and not (value == defaults.get(key) and key in cls.variables and os.getenv(cls.variables[key]))
        }

    def restart(self, step: int) -> None:
        """Begin a new run of the tracker, which the steps up to `step` are logged into again: the run resumes from there,
        and the old run of the tracker has later steps, which no tracker takes back."""

    def accepted(self, name: str) -> str:
        return accepted_name(name, self.refused, self.longest)

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
        """Every number by the name that it is logged under."""
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        scalars = {name: scalar_of(value) for name, value in flat.items()}
        return {
            self.accepted(name): value
            for name, value in scalars.items()
            if value is not None and not isinstance(value, str)
        }

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Log the summary of the values: the package has no histograms."""
        self.send(self.summary(name, to_plain(histogram)), step)

    def summary(self, name: str, values: object) -> dict[str, float]:
        """Return the `summarize_list` of a list by the names that it is logged under."""
        numbers = summarize_list(values) if isinstance(values, list) else {}
        return {self.accepted(f"{name}/{key}"): number for key, number in numbers.items()}


class WandbLogger(TrackerLogger):
    """Weights & Biases. A run that resumes in the same folder continues the same W&B run."""

    section = WandbConfig
    variables = {
        "project": "WANDB_PROJECT", "name": "WANDB_NAME", "entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP",
        "job_type": "WANDB_JOB_TYPE", "tags": "WANDB_TAGS", "notes": "WANDB_NOTES", "mode": "WANDB_MODE",
        "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME",
    }  # fmt: skip

    def __init__(self, cfg: WandbConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.wandb`, passed on to `wandb.init` (project, name, entity, tags, ...)."""
        self._wandb = self.package("wandb")
        self._cfg, self._log_dir = cfg, log_dir
        self._start(_RunFile(log_dir).read())

    def _start(self, known: str | None, **more: Plain) -> None:
        options = self.given(self._cfg) | more
        options.pop("log_nemo_gym_full_result_tables", None)
        if known and "id" not in options and not os.getenv("WANDB_RUN_ID"):
            options |= {"id": known, "resume": "allow"}
        try:
            self.run = self._wandb.init(**options, dir=self._log_dir)
        except Exception as error:  # its own kinds of errors differ by version
            raise ValueError(
                f"logger.wandb_enabled=true, but wandb does not start ({error}): run `wandb login` or set WANDB_API_KEY; without an "
                "account set WANDB_MODE=offline, or logger.wandb_enabled=false"
            ) from error
        _RunFile(self._log_dir).write(self.run.id)

    def restart(self, step: int) -> None:
        """Begin a new W&B run, whose config names the old one."""
        old = self.run.id
        self.finish()
        self._start(None, id=secrets.token_hex(4), resume="never", config={"resumed_from": f"{old}, step {step}"})

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Gives the metrics that match `name` (for example `ray/*`) an x axis of their own."""
        self.run.define_metric(name, step_metric=step_metric)

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Logs into the step's row, which W&B sends when `step_finished` or when a later step begins."""
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
        """Logs a W&B histogram, or the value itself when all are equal (no bins can be made of one value)."""
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
    """MLflow. Scalars only: lists are logged as their mean, p50, p90 and max."""

    refused = r"[^/\w.\- :]"  # mlflow.utils.validation
    section = MLflowConfig
    variables = {
        "experiment_name": "MLFLOW_EXPERIMENT_NAME",
        "run_name": "MLFLOW_RUN_NAME",
        "tracking_uri": "MLFLOW_TRACKING_URI",
        "run_id": "MLFLOW_RUN_ID",
    }

    def __init__(self, cfg: MLflowConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.mlflow` with experiment_name, run_name, run_id, tracking_uri, artifact_location."""
        self._mlflow = self.package("mlflow")
        self._file, self._step = _RunFile(log_dir), 0
        options = self.options(cfg)
        self._name = options.get("run_name")
        if uri := options.get("tracking_uri"):
            check_server(uri, _MLFLOW_ADDRESS)
            self._mlflow.set_tracking_uri(uri)
        run_id = options.get("run_id") or self._file.read()
        if self._mlflow.active_run() is not None:
            self._mlflow.end_run()
        if run_id:
            self._start(run_id=run_id)
        else:
            self._choose_experiment(options.get("experiment_name"), options.get("artifact_location") or log_dir)
            self._start(run_name=self._name)

    @classmethod
    def options(cls, cfg: MLflowConfig | Mapping[str, object] | None) -> dict[str, str]:
        """Return the values in use: of the keys that are given, else of MLflow's environment variables."""
        return {key: value for key, name in cls.variables.items() if (value := os.getenv(name))} | cls.given(cfg)

    def _start(self, **options: object) -> None:
        run = self._mlflow.start_run(**options)
        self.run_id, self._experiment = run.info.run_id, getattr(run.info, "experiment_id", None)
        self._file.write(self.run_id)

    def restart(self, step: int) -> None:
        """Begin a new MLflow run in the same experiment, whose tag names the old one."""
        self._mlflow.end_run()
        tags = {"resumed_from": f"{self.run_id}, step {step}"}
        self._start(run_name=self._name, experiment_id=self._experiment, tags=tags)

    def truncate_after(self, step: int) -> None:
        """Note the step that the run resumes from, for the parameters that have changed."""
        self._step = step

    def _choose_experiment(self, name: str | None, artifacts: str | None) -> None:
        if name is None:
            return
        if self._mlflow.get_experiment_by_name(name) is None:
            self._mlflow.create_experiment(name=name, artifact_location=artifacts)
        self._mlflow.set_experiment(name)

    def numbers(self, metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, float]:
        """Every number, and a summary of every list of numbers."""
        row: dict[str, float] = {}
        named = prefixed(merge_generation_workers(metrics), prefix, None)
        for name, value in flatten_dict(named, sep="/", expand_lists=False).items():
            number = scalar_of(value)
            if isinstance(value, list) and len(value) != 1:
                row |= self.summary(name, value)
            elif number is not None and not isinstance(number, str):
                row[self.accepted(name)] = float(number)
        return row

    def send(self, row: dict[str, float], step: int) -> None:
        if row:
            self._mlflow.log_metrics(row, step=step, run_id=self.run_id)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Log the flattened configuration as parameters. MLflow never changes one: a value that is another than before the
        run resumed becomes the parameter `NAME.from_step_N`."""
        flat = flatten_dict(to_plain(params))
        logged = self._mlflow.get_run(self.run_id).data.params if self._step else {}
        flat = dict(filter(None, (self._changed(logged, name, value) for name, value in flat.items())))
        if flat:
            self._mlflow.log_params(flat, run_id=self.run_id)

    def _changed(self, logged: Mapping[str, str], name: str, value: object) -> tuple[str, object] | None:
        """Return the name and value under which a parameter is logged; None when its newest value is this one."""
        first = self.accepted(name)
        stem = accepted_name(name, self.refused, self.longest - 30)  # leaves room for what is added
        later = re.compile(re.escape(stem) + r"\.from_step_(\d+)(?:\.(\d+))?")
        values = [((0, 0), logged[first])] if first in logged else []
        for known, text in logged.items():
            if found := later.fullmatch(known):
                values.append(((int(found[1]), int(found[2] or 1)), text))
        if not values:
            return first, value
        (step, number), last = max(values)
        # MLflow cuts long values
        if last == str(value)[: len(last)] and (len(last) == len(str(value)) or len(last) >= 500):
            return None
        repeated = f".{number + 1}" if step == self._step else ""
        return f"{stem}.from_step_{self._step}{repeated}", value

    def finish(self) -> None:
        self._mlflow.end_run()


_MLFLOW_ADDRESS = "logger.mlflow.tracking_uri or MLFLOW_TRACKING_URI"


class SwanlabLogger(TrackerLogger):
    """SwanLab."""

    section = SwanlabConfig
    variables = {
        "project": "SWANLAB_PROJ_NAME",
        "name": "SWANLAB_EXP_NAME",
        "workspace": "SWANLAB_WORKSPACE",
        "mode": "SWANLAB_MODE",
    }

    def __init__(self, cfg: SwanlabConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.swanlab`, passed on to `swanlab.init` (project, name, ...)."""
        self._swanlab = self.package("swanlab")
        self._options = self.given(cfg) | {"logdir": log_dir}
        self.run = self._swanlab.init(**self._options)

    def restart(self, step: int) -> None:
        """Begin a new SwanLab run, whose config names the old one."""
        old = getattr(self.run, "id", None) or self.run.public.run_id
        self._swanlab.finish()
        self.run = self._swanlab.init(**self._options, config={"resumed_from": f"{old}, step {step}"})

    def send(self, row: dict[str, float], step: int) -> None:
        self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        self.run.config.update(to_plain(params), allow_val_change=True)

    def finish(self) -> None:
        self._swanlab.finish()


class TrackioLogger(TrackerLogger):
    """Trackio, which keeps its data in a local database. A run that resumes in the same folder continues there."""

    section = TrackioConfig

    def __init__(self, cfg: TrackioConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.trackio`, passed on to `trackio.init` (project, name, space_id, ...)."""
        self._trackio = self.package("trackio")
        self._options, self._file = self.given(cfg), _RunFile(log_dir)
        self._options.setdefault("project", "nemo-rl-cpp")
        known = self._file.read()
        self._start({"name": known, "resume": "allow"} if known else {})

    def _start(self, more: Mapping[str, Plain]) -> None:
        self.run = self._trackio.init(**self._options | more)
        self._file.write(self.run.name)

    def restart(self, step: int) -> None:
        """Begin a new Trackio run, whose name says the step that it resumed from."""
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
    """Raise ValueError when the server of an enabled tracker does not answer; called before a model is loaded."""
    if cfg.is_enabled("mlflow") and (uri := MLflowLogger.options(cfg.mlflow).get("tracking_uri")):
        check_server(uri, _MLFLOW_ADDRESS)


def merge_generation_workers(metrics: Mapping[str, object]) -> dict[str, object]:
    """`generation_logger_metrics`, {name: {worker: values}}, with the values of all workers in one list a name."""
    by_name = metrics.get("generation_logger_metrics")
    if not isinstance(by_name, Mapping):
        return dict(metrics)
    merged = {
        name: [value for values in workers.values() for value in values] if isinstance(workers, Mapping) else workers
        for name, workers in by_name.items()
    }
    return {**metrics, "generation_logger_metrics": merged}


def summarize_list(values: Iterable[object]) -> dict[str, float]:
    """`mean`, `p50`, `p90` and `max` of the numbers among the values; nothing where there are none."""
    kinds = (int, float, np.integer, np.floating)
    numbers = np.asarray(
        [value for value in values if isinstance(value, kinds) and not isinstance(value, bool)], dtype=float
    )
    if not numbers.size:
        return {}
    p50, p90 = np.percentile(numbers, [50, 90])
    return {"mean": float(numbers.mean()), "p50": float(p50), "p90": float(p90), "max": float(numbers.max())}
