"""The logger of a run, which writes metrics and rollouts to files, and metrics to the trackers that are enabled."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from nemo_rl_cpp.config.access import as_number, to_json, to_plain, written
from nemo_rl_cpp.config.base import Settings
from nemo_rl_cpp.config.logger import LOGGER_BACKENDS, GPUMonitoringConfig, LoggerConfig
from nemo_rl_cpp.files.durable import disk_trouble, json_rows
from nemo_rl_cpp.files.folder_lock import FolderLock
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.backends import TrackerLogger, WandbLogger
from nemo_rl_cpp.loggers.folders import METRICS, JsonlLogger, LogLedger
from nemo_rl_cpp.loggers.interface import LoggerInterface, Metrics
from nemo_rl_cpp.metrics.memory import RayGpuMonitorLogger


class Logger(LoggerInterface, AbstractContextManager["Logger"]):
    """The logger of a run: metrics.jsonl, TensorBoard events (unless `tensorboard_enabled` is false), and trackers. A
    failing tracker or a full disk gives one warning; other errors end the run."""

    def __init__(self, section: LoggerConfig) -> None:
        """Create the folder and the backends. Raise ValueError if a tracker's package is missing."""
        self.log_dir = Path(section.log_dir).absolute()  # the user's code may change the working directory
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.loggers: list[LoggerInterface] = []
        self.wandb_logger: WandbLogger | None = None
        self._failed: set[str] = set()
        self._is_finished = False
        self._files: list[LoggerInterface] = [JsonlLogger(self.log_dir)]
        self.ledger = LogLedger(self.log_dir)
        self._lock: FolderLock | None = None
        for name in LOGGER_BACKENDS:
            if getattr(section, f"{name}_enabled"):
                folder = self.log_dir / name
                folder.mkdir(exist_ok=True)
                self.loggers.append(LOGGER_BACKENDS[name](getattr(section, name), log_dir=str(folder)))
                if name == "wandb":
                    self.wandb_logger = self.loggers[-1]
                if name == "tensorboard":
                    self._files.append(self.loggers[-1])
        self.gpu_monitor = self._start_monitor(section.gpu_monitoring) if section.monitor_gpus else None

    def claim(self, checkpoint_dir: Path | None = None) -> None:
        """Lock the folder against other runs until `finish`, and record that the logs belong to the run that saves into
        `checkpoint_dir`. Raise FolderInUseError (a ValueError) if another run uses the folder."""
        self._lock = self._lock or FolderLock(self.log_dir, "logger.log_dir")
        if checkpoint_dir is not None:
            self.ledger.own(checkpoint_dir.resolve())

    def _start_monitor(self, section: GPUMonitoringConfig) -> RayGpuMonitorLogger | None:
        monitor = RayGpuMonitorLogger(section.collection_interval, section.flush_interval, parent_logger=self)
        if not monitor.available:
            return None
        if self.wandb_logger is not None:
            self.wandb_logger.run.define_metric("ray/*", step_metric="ray/ray_step")  # the x axis
        monitor.start()
        return monitor

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Log metrics at `step` (counted from 1) with all backends (see `LoggerInterface.log_metrics`)."""
        self._each(lambda logger: logger.log_metrics(metrics, step, prefix, step_metric, step_finished))

    def log_hyperparams(self, params: Settings) -> None:
        """Log the configuration, a mapping or a model, without its secrets (see `access.written`)."""
        plain = written(params)
        self._each(lambda logger: logger.log_hyperparams(plain))

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        self._each(lambda logger: logger.log_histogram(histogram, step, name))

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, object], filename: str) -> None:
        """Write a file in the log folder with one line per sample, with its index `idx`. Every value has one entry per
        sample. If the disk is full, warn and write nothing."""
        columns = {key: value if isinstance(value, list) else to_plain(value) for key, value in to_log.items()}
        count = len(next(iter(columns.values()), ()))
        path = self.log_dir / filename
        temporary = path.with_name(f".{path.name}.tmp")
        lines = (_json_line({key: value[i] for key, value in columns.items()} | {"idx": i}) for i in range(count))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.ledger.unsynced.add(path)
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(lines)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._note_full_disk("files of steps", error)

    def _note_full_disk(self, name: str, error: OSError) -> None:
        """Warn, once per run, that `name` could not be written because the disk is full; raise any other error."""
        if (trouble := disk_trouble(error)) is None:
            raise error
        if name not in self._failed:
            self._failed.add(name)
            warnings.warn(
                f"{self.log_dir}: {trouble}: {name} cannot be written; the run continues, later failures are not shown",
                stacklevel=4,
            )

    def flush(self) -> None:
        """Sync the files to disk, before a checkpoint is published."""
        self._each(lambda logger: logger.flush())
        self.ledger.sync()

    def truncate_after(self, step: int) -> None:
        """Remove everything logged after `step`, from which the run resumes. If a tracker's run has later steps, a new
        one begins with the metrics up to `step`."""
        trackers = [logger for logger in self.loggers if isinstance(logger, TrackerLogger)]
        metrics = self.log_dir / METRICS
        restarts = bool(trackers) and any(row["step"] > step for row in _metric_rows(metrics))
        self._each(lambda logger: logger.truncate_after(step))
        if restarts:
            self._each(lambda tracker: tracker.restart(step), trackers)
            for row in _metric_rows(metrics):
                number = int(row.pop("step"))
                self._each(lambda tracker: tracker.log_metrics(row, number), trackers)
        self.ledger.cut(step)

    def finish(self) -> None:
        """Stop the GPU monitor, close all backends and unlock the folder. Further calls do nothing."""
        if self.gpu_monitor is not None:
            self.gpu_monitor.stop()
            self.gpu_monitor = None
        if not self._is_finished:  # trackers reject a second call
            self._is_finished = True
            self._each(lambda logger: logger.finish())
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _each(self, action: Callable[..., None], backends: Sequence[LoggerInterface] | None = None) -> None:
        """Call `action(backend)` for each of `backends` (None: all). If it fails for a backend, print a warning."""
        for logger in dict.fromkeys([*self._files, *self.loggers]) if backends is None else backends:
            try:
                action(logger)
            except Exception as error:
                if logger in self._files:
                    if not isinstance(error, OSError):
                        raise
                    self._note_full_disk(f"lines of {type(logger).__name__}", error)
                    continue
                name = type(logger).__name__
                if name not in self._failed:
                    self._failed.add(name)
                    warnings.warn(
                        f"{name} failed ({error}): the run continues, later failures are hidden", stacklevel=3
                    )

    def __exit__(self, *exc: object) -> None:
        self.finish()


def _metric_rows(path: Path) -> Iterator[dict[str, Plain]]:
    """Yield the lines of a metrics.jsonl. Numbers that `to_json` wrote as text ("nan", "inf") become numbers."""
    if path.is_file():
        for row in json_rows(path.read_bytes().splitlines()):
            if isinstance(row.get("step"), int):
                yield {name: value if (number := as_number(value)) is None else number for name, value in row.items()}


_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would create an encoder for every line


def _json_line(row: Mapping[str, object]) -> str:
    try:
        return _encode(row) + "\n"  # fast in the common case that all values are plain and finite
    except (TypeError, ValueError):
        return _encode(to_json(row)) + "\n"
