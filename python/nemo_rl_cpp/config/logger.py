"""The `logger` section."""

from __future__ import annotations

from .base import Count, Real, Section, key, no_effect, section


class WandbConfig(Section):
    """Weights & Biases; used when logger.wandb_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")
    entity: str | None = key(None, "team or user")
    log_nemo_gym_full_result_tables: bool = no_effect(False)


class SwanlabConfig(Section):
    """SwanLab; used when logger.swanlab_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")


class MLflowConfig(Section):
    """MLflow; used when logger.mlflow_enabled."""

    experiment_name: str = key("grpo-dev", "experiment")
    run_name: str | None = key("grpo-dev-logger", "name of the run")
    tracking_uri: str | None = key("http://localhost:5000", "server, or a folder")


class TrackioConfig(Section):
    """Trackio; used when logger.trackio_enabled."""

    project: str = key("grpo-dev", "project")
    name: str | None = key("grpo-dev-logger", "name of the run")


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
    tensorboard_enabled: bool = key(False, "write TensorBoard events")
    wandb_enabled: bool = key(False, "log to Weights & Biases (needs the extra `wandb`)")
    mlflow_enabled: bool = key(False, "log to MLflow (needs the extra `mlflow`)")
    swanlab_enabled: bool = key(False, "log to SwanLab (needs the extra `swanlab`)")
    trackio_enabled: bool = key(False, "log to Trackio (needs the extra `trackio`)")
    monitor_gpus: bool = key(True, "sample the GPUs' use, where there are GPUs")
    wandb: WandbConfig = section(WandbConfig, "Weights & Biases")
    tensorboard: TensorboardConfig = section(TensorboardConfig, "TensorBoard")
    mlflow: MLflowConfig = section(MLflowConfig, "MLflow")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio")
    gpu_monitoring: GPUMonitoringConfig = section(GPUMonitoringConfig, "sampling of the GPUs' use")
