"""The `logger` section."""

from __future__ import annotations

from typing import Literal

from .base import Count, Real, Section, key, no_effect, section


class WandbConfig(Section):
    """Weights & Biases; used when logger.wandb_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")
    entity: str | None = key(None, "team or user")
    group: str | None = key(None, "group of runs")
    job_type: str | None = key(None, "kind of run")
    tags: list[str] | None = key(None, "tags")
    notes: str | None = key(None, "text shown with the run")
    mode: Literal["online", "offline", "disabled", "shared"] | None = key(
        None, "online, offline, disabled or shared; null: WANDB_MODE"
    )
    id: str | None = key(None, "identifier of a run to continue")
    resume: Literal["allow", "must", "never", "auto"] | None = key(None, "how that run continues")
    log_nemo_gym_full_result_tables: bool = no_effect(False)


class SwanlabConfig(Section):
    """SwanLab; used when logger.swanlab_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")
    workspace: str | None = key(None, "team or user")
    description: str | None = key(None, "text shown with the run")
    tags: list[str] | None = key(None, "tags")
    mode: str | None = key(None, "cloud, local, offline or disabled")


class MLflowConfig(Section):
    """MLflow; used when logger.mlflow_enabled."""

    experiment_name: str = key("grpo-dev", "experiment")
    run_name: str | None = key("grpo-dev-logger", "name of the run")
    tracking_uri: str | None = key(None, "server, or a folder; null: MLFLOW_TRACKING_URI")
    run_id: str | None = key(None, "identifier of a run to continue")
    artifact_location: str | None = key(None, "where files go; null: the run's log folder")


class TrackioConfig(Section):
    """Trackio; used when logger.trackio_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")
    group: str | None = key(None, "group of runs")
    space_id: str | None = key(None, "Hugging Face Space that shows the run")


class TensorboardConfig(Section):
    """TensorBoard; used when logger.tensorboard_enabled."""

    log_dir: str | None = key(None, "folder of the events; null: <log_dir>/tensorboard")


class GPUMonitoringConfig(Section):
    """How often the devices' use is sampled when logger.monitor_gpus."""

    collection_interval: Real = key(10, "seconds between samples", gt=0)
    flush_interval: Real = key(10, "seconds between writes", gt=0)


class LoggerConfig(Section):
    """Where a run writes what it measures: metrics.jsonl always, the others when enabled."""

    log_dir: str = key("logs", "folder; each run makes exp_NNN in it")
    num_val_samples_to_print: Count = key(0, "validation samples shown in the terminal")
    report: bool = key(True, "write report.html, one self-contained page")
    chrome_trace: bool = key(
        False, "write the stages of every step as a timeline for chrome://tracing and ui.perfetto.dev"
    )
    tensorboard_enabled: bool = key(True, "write TensorBoard events")
    wandb_enabled: bool = key(False, "log to Weights & Biases (needs the extra `wandb`)")
    mlflow_enabled: bool = key(False, "log to MLflow (needs the extra `mlflow`)")
    swanlab_enabled: bool = key(False, "log to SwanLab (needs the extra `swanlab`)")
    trackio_enabled: bool = key(False, "log to Trackio (needs the extra `trackio`)")
    monitor_gpus: bool = key(True, "sample how much the GPUs are used, if there are any")
    wandb: WandbConfig = section(WandbConfig, "Weights & Biases")
    tensorboard: TensorboardConfig = section(TensorboardConfig, "TensorBoard")
    mlflow: MLflowConfig = section(MLflowConfig, "MLflow")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio")
    gpu_monitoring: GPUMonitoringConfig = section(GPUMonitoringConfig, "sampling of the GPUs' use")
