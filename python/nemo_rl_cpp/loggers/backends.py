"""Experiment trackers: wandb, mlflow, swanlab and trackio. Each package is imported only when its backend is enabled."""

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.logger import MLflowConfig, SwanlabConfig, TrackioConfig, WandbConfig
from nemo_rl_cpp.config.sections import read_section
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


class TrackerLogger(LoggerInterface):
    """A backend that hands everything to the package of a tracker. One that logs numbers alone overrides `send`."""

    package = staticmethod(import_tracker)

    def send(self, row: dict[str, float], step: int) -> None:
        """Logs numbers by their names."""
        raise NotImplementedError

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Logs the `numbers` of the metrics."""
        self.send(self.numbers(metrics, prefix, step_metric), step)

    def numbers(self, metrics: Mapping[str, object], prefix: str | None, step_metric: str | None) -> dict[str, float]:
        """Every number by the name that it is logged under."""
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        scalars = {name: scalar_of(value) for name, value in flat.items()}
        return {name: value for name, value in scalars.items() if value is not None and not isinstance(value, str)}

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """The summary of the values is logged: the package has no histograms."""
        self.send(_summary(name, to_plain(histogram)), step)


class WandbLogger(TrackerLogger):
    """Weights & Biases. A run that resumes in the same folder continues the same W&B run."""

    def __init__(self, cfg: WandbConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.wandb`, passed on to `wandb.init` (project, name, entity, tags, ...)."""
        self._wandb = self.package("wandb")
        options = _given(cfg)
        options.pop("log_nemo_gym_full_result_tables", None)
        file = _RunFile(log_dir)
        if "id" not in options and (known := file.read()):
            options |= {"id": known, "resume": "allow"}
        try:
            self.run = self._wandb.init(**options, dir=log_dir)
        except Exception as error:  # its own kinds of errors differ by version
            raise ValueError(
                f"logger.wandb_enabled=true, but wandb does not start ({error}): run `wandb login` or set WANDB_API_KEY; without an "
                "account set WANDB_MODE=offline, or logger.wandb_enabled=false"
            ) from error
        file.write(self.run.id)

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
        row = {name: to_plain(value) for name, value in prefixed(metrics, prefix, step_metric).items()}
        if step_metric and (step_metric in metrics or step_metric in row):
            self.run.log(row, commit=False)
        elif step_finished:
            self.run.log(row, step=step, commit=True)
        else:
            self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Sets the run's config."""
        self.run.config.update(to_plain(params), allow_val_change=True)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Logs a W&B histogram, or the value itself when all are equal (no bins can be made of one value)."""
        values = np.asarray(to_plain(histogram), dtype=np.float64).ravel()
        values = values[np.isfinite(values)]
        if values.size:
            same = values.min() == values.max()
            self.run.log({name: float(values[0]) if same else self._wandb.Histogram(values)}, step=step)

    def finish(self) -> None:
        """Sends what is queued and ends the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None


class MLflowLogger(TrackerLogger):
    """MLflow. Scalars only: lists are logged as their mean, p50, p90 and max."""

    def __init__(self, cfg: MLflowConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.mlflow` with experiment_name, run_name, run_id, tracking_uri, artifact_location; the variables
        MLFLOW_TRACKING_URI, MLFLOW_RUN_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_NAME stand in for absent ones."""
        self._mlflow = self.package("mlflow")

        section = read_section(cfg or {}, MLflowConfig, experiment_name=None, run_name=None)

        def option(name: str) -> str | None:
            return getattr(section, name) or os.getenv(f"MLFLOW_{name.upper()}")

        file = _RunFile(log_dir)
        if uri := option("tracking_uri"):
            self._mlflow.set_tracking_uri(uri)
        run_id = option("run_id") or file.read()
        if self._mlflow.active_run() is not None:
            self._mlflow.end_run()
        if run_id:
            run = self._mlflow.start_run(run_id=run_id)
        else:
            self._choose_experiment(option("experiment_name"), section.artifact_location or log_dir)
            run = self._mlflow.start_run(run_name=option("run_name"))
        self.run_id = run.info.run_id
        file.write(self.run_id)

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
                row |= _summary(name, value)
            elif number is not None and not isinstance(number, str):
                row[name] = float(number)
        return row

    def send(self, row: dict[str, float], step: int) -> None:
        if row:
            self._mlflow.log_metrics(row, step=step, run_id=self.run_id)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Logs the flattened configuration as parameters."""
        self._mlflow.log_params(flatten_dict(to_plain(params)), run_id=self.run_id)

    def finish(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


class SwanlabLogger(TrackerLogger):
    """SwanLab."""

    def __init__(self, cfg: SwanlabConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.swanlab`, passed on to `swanlab.init` (project, name, ...)."""
        self._swanlab = self.package("swanlab")
        options = _given(cfg)
        self.run = self._swanlab.init(**options, logdir=log_dir)

    def send(self, row: dict[str, float], step: int) -> None:
        self.run.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Sets the run's config."""
        self.run.config.update(to_plain(params), allow_val_change=True)

    def finish(self) -> None:
        """Ends the run."""
        self._swanlab.finish()


class TrackioLogger(TrackerLogger):
    """Trackio, which keeps its data in a local database. A run that resumes in the same folder goes on there."""

    def __init__(self, cfg: TrackioConfig | Mapping[str, object] | None, log_dir: str | None = None) -> None:
        """`cfg`: `logger.trackio`, passed on to `trackio.init` (project, name, space_id, ...)."""
        self._trackio = self.package("trackio")
        options = _given(cfg)
        options.setdefault("project", "nemo-rl-cpp")
        file = _RunFile(log_dir)
        if known := file.read():
            options |= {"name": known, "resume": "allow"}
        self.run = self._trackio.init(**options)
        file.write(self.run.name)

    def send(self, row: dict[str, float], step: int) -> None:
        self._trackio.log(row, step=step)

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Adds the configuration to the run."""
        self.run.config.update(to_plain(params))

    def finish(self) -> None:
        """Ends the run."""
        self._trackio.finish()


def _given(cfg: object) -> dict[str, Plain]:
    """The keys of a tracker's section that have a value."""
    section = to_plain(cfg or {})
    return {key: value for key, value in section.items() if value is not None} if isinstance(section, dict) else {}


def _summary(name: str, values: object) -> dict[str, float]:
    numbers = summarize_list(values) if isinstance(values, list) else {}
    return {f"{name}/{key}": number for key, number in numbers.items()}


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
