"""The `logger` section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic.fields import FieldInfo

from .base import Count, Entry, Folder, Real, Section, Table, key, section

if TYPE_CHECKING:
    from nemo_rl_cpp.loggers.interface import LoggerInterface


class WandbConfig(Section):
    """Settings of Weights & Biases. Used if logger.wandb_enabled is true. Environment variables (WANDB_PROJECT, ...)
    give the values of keys that are not set."""

    project: str = key("grpo-dev", "Project of the run.")
    name: str | None = key("grpo-dev-logger", "Name of the run.")
    entity: str | None = key(None, "Team or user that owns the run.")
    group: str | None = key(None, "Group of runs that this run belongs to.")
    job_type: str | None = key(None, "Type of the run, for filters.")
    tags: list[str] | None = key(None, "Tags of the run.")
    notes: str | None = key(None, "Description of the run.")
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Mode of Weights & Biases: online, offline, disabled or shared."""
    id: str | None = key(None, "Id of an earlier run to continue.")
    resume: Literal["allow", "must", "never", "auto"] | None = None
    """Whether to continue the run with this id, as in wandb.init(resume=...)."""


class SwanlabConfig(Section):
    """Settings of SwanLab. Used if logger.swanlab_enabled is true. Environment variables (SWANLAB_PROJ_NAME, ...) give
    the values of keys that are not set."""

    project: str = key("grpo-dev", "Project of the run.")
    name: str | None = key("grpo-dev-logger", "Name of the run.")
    workspace: str | None = key(None, "Team or user that owns the run.")
    description: str | None = key(None, "Description of the run.")
    tags: list[str] | None = key(None, "Tags of the run.")
    mode: str | None = key(None, "Mode of SwanLab: cloud, local, offline or disabled.")


class MLflowConfig(Section):
    """Settings of MLflow. Used if logger.mlflow_enabled is true. Environment variables (MLFLOW_RUN_NAME, ...) give the
    values of keys that are not set."""

    experiment_name: str = key("grpo-dev", "Experiment that the run belongs to.")
    run_name: str | None = key("grpo-dev-logger", "Name of the run.")
    tracking_uri: str | None = None
    """URI of the tracking server, or a folder. null: MLflow's own setting (MLFLOW_TRACKING_URI)."""
    run_id: str | None = key(None, "Id of an earlier run to continue.")
    artifact_location: str | None = key(None, "Location of the experiment's artifacts. null: the run's log folder.")


class TrackioConfig(Section):
    """Settings of Trackio. Used if logger.trackio_enabled is true."""

    project: str = key("grpo-dev", "Project of the run.")
    name: str | None = key("grpo-dev-logger", "Name of the run.")
    group: str | None = key(None, "Group of runs that this run belongs to.")
    space_id: str | None = key(None, "Hugging Face Space that shows the run.")


class TensorboardConfig(Section):
    """Settings of TensorBoard. Used if logger.tensorboard_enabled is true."""

    log_dir: Folder | None = None
    """Folder of the event files. null: the subfolder tensorboard of the run's log folder."""


class GPUMonitoringConfig(Section):
    """Settings of the logging of GPU usage: its intervals. Used if logger.monitor_gpus is true."""

    collection_interval: Real = key(10, "Seconds between samples of the GPU usage.", gt=0)
    flush_interval: Real = key(10, "Seconds between writes of the samples to the logs.", gt=0)


class LoggerConfig(Section):
    """Settings of logging. Metrics are always written to metrics.jsonl, and also to each enabled backend.

    A backend called NAME has two keys: the switch NAME_enabled, and the section NAME."""

    log_dir: Folder = key("logs", "Folder for logs. Each run creates a subfolder exp_NNN.")
    num_val_samples_to_print: Count = key(0, "Number of validation samples to print per validation.")
    report: bool = key(True, "Write report.html, a self-contained page about the run.")
    monitor_gpus: bool = key(True, "Log the usage of the GPUs, if there are any.")
    gpu_monitoring: GPUMonitoringConfig = section(GPUMonitoringConfig)


@dataclass(frozen=True)
class LoggerEntry(Entry):
    """A logger backend: its class, its section, description and default of its switch, and the package it needs."""

    section: type[Section] = Section
    doc: str = ""
    enabled: bool = False
    package: str | None = None

    def keys(self, name: str) -> dict[str, FieldInfo]:
        """Return the two keys of the backend called `name` in the section `logger`: its switch and its section."""
        switch, own = key(self.enabled, self.doc), section(self.section)
        return {
            f"{name}_enabled": FieldInfo.from_annotated_attribute(bool, switch),
            name: FieldInfo.from_annotated_attribute(self.section, own),
        }


def _tracker(cls: str, section: type[Section], title: str, name: str) -> LoggerEntry:
    doc = f"log to {title} (needs the extra `{name}`)"
    return LoggerEntry(f"nemo_rl_cpp.loggers.backends:{cls}", section, doc, package=name)


LOGGER_BACKENDS: Table[LoggerEntry] = Table(
    "logger back end",
    {
        "wandb": _tracker("WandbLogger", WandbConfig, "Weights & Biases", "wandb"),
        "swanlab": _tracker("SwanlabLogger", SwanlabConfig, "SwanLab", "swanlab"),
        "tensorboard": LoggerEntry(
            "nemo_rl_cpp.loggers.tensorboard:TensorboardLogger", TensorboardConfig, "write TensorBoard events", True
        ),
        "mlflow": _tracker("MLflowLogger", MLflowConfig, "MLflow", "mlflow"),
        "trackio": _tracker("TrackioLogger", TrackioConfig, "Trackio", "trackio"),
    },
)
"""The table of logger backends, name -> class. A run creates them in this order."""

for _name, _entry in LOGGER_BACKENDS.data.items():
    LoggerConfig.model_fields.update(_entry.keys(_name))


def register_logger(
    name: str,
    cls: Callable[..., LoggerInterface] | str,
    keys: type[Section] = Section,
    doc: str = "log to a user-defined backend",
) -> None:
    """Add a logger backend, which the keys NAME_enabled and NAME (of the class `keys`) of the section `logger`
    configure. `cls(section, log_dir=folder)`, a class or function or its name as package.module:Name, must return a
    `nemo_rl_cpp.loggers.interface.LoggerInterface`. `doc` describes the keys. Raise ValueError if `name` is taken."""
    entry = LoggerEntry(cls, keys, doc)
    if name in LoggerConfig.model_fields:
        raise ValueError(f"logger has a key {name} already: choose another name")
    LOGGER_BACKENDS.add(name, entry, LoggerConfig, entry.keys(name))
