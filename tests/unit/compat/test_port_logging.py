"""Loggers and timers as scripts and tests for NeMo RL use them: classes and packages replaced in `utils.logger`."""

import json
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from nemo_rl_cpp.compat.utils import logger as module
from nemo_rl_cpp.compat.utils.logger import Logger, MLflowLogger, SwanlabLogger, TensorboardLogger, WandbLogger
from nemo_rl_cpp.compat.utils.timer import Timer

OFF = {f"{name}_enabled": False for name in ("wandb", "swanlab", "mlflow", "tensorboard", "trackio")} | {
    "monitor_gpus": False
}


def test_backends_are_the_classes_that_the_module_holds(tmp_path):
    config = OFF | {
        "log_dir": str(tmp_path),
        "wandb_enabled": True,
        "tensorboard_enabled": True,
        "wandb": {"project": "p"},
    }
    with patch.object(module, "WandbLogger") as wandb, patch.object(module, "TensorboardLogger") as tensorboard:
        logger = Logger(config)
        logger.log_metrics({"loss": 0.5}, 3, prefix="train", step_metric="i")
        logger.log_hyperparams({"lr": 0.1})
    assert logger.loggers == [wandb.return_value, tensorboard.return_value]
    assert wandb.call_args.args == ({"project": "p"},)
    for backend in logger.loggers:
        backend.log_metrics.assert_called_once_with({"loss": 0.5}, 3, "train", "i", False)
        backend.log_hyperparams.assert_called_once_with({"lr": 0.1})


def test_nothing_enabled_leaves_the_metrics_file_alone_and_no_logger(tmp_path):
    logger = Logger(OFF | {"log_dir": str(tmp_path)})
    assert logger.loggers == []
    logger.log_metrics({"loss": 1.0}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_gpu_monitor_gets_its_settings_and_an_axis_in_wandb(tmp_path):
    config = OFF | {
        "log_dir": str(tmp_path),
        "wandb_enabled": True,
        "monitor_gpus": True,
        "gpu_monitoring": {"collection_interval": 15.0, "flush_interval": 45.0},
    }
    with patch.object(module, "WandbLogger") as wandb, patch.object(module, "RayGpuMonitorLogger") as monitor:
        logger = Logger(config)
    monitor.assert_called_once_with(
        collection_interval=15.0,
        flush_interval=45.0,
        metric_prefix="ray",
        step_metric="ray/ray_step",
        parent_logger=logger,
    )
    monitor.return_value.start.assert_called_once()
    wandb.return_value.define_metric.assert_called_once_with("ray/*", step_metric="ray/ray_step")


def test_wandb_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with patch.object(module, "wandb") as package:
        backend = WandbLogger(
            {"project": "p", "tags": ["a"], "log_nemo_gym_full_result_tables": True}, log_dir=str(tmp_path / "w")
        )
        package.init.assert_called_once_with(project="p", tags=["a"], dir=str(tmp_path / "w"))
        run = package.init.return_value
        backend.log_metrics({"loss": 1.0, "iteration": 15}, 10, prefix="train", step_metric="train/iteration")
        run.log.assert_called_once_with({"train/loss": 1.0, "train/iteration": 15}, commit=False)
        WandbLogger({})
    assert list(tmp_path.iterdir()) == [], "without a log folder nothing is written to the working directory"


def test_swanlab_calls():
    with patch.object(module, "swanlab") as package:
        backend = SwanlabLogger({"project": "p"}, log_dir="somewhere")
        backend.log_metrics({"loss": 1.0}, 2)
        backend.log_hyperparams({"lr": 0.1})
    package.init.assert_called_once_with(project="p", logdir="somewhere")
    package.init.return_value.log.assert_called_once_with({"loss": 1.0}, step=2)
    package.init.return_value.config.update.assert_called_once_with({"lr": 0.1}, allow_val_change=True)


def test_mlflow_calls():
    with patch.object(module, "mlflow") as package:
        package.active_run.return_value = None
        package.get_experiment_by_name.return_value = None
        backend = MLflowLogger({"experiment_name": "e", "run_name": "r"}, log_dir="/no/such/folder")
        package.create_experiment.assert_called_once_with(name="e", artifact_location="/no/such/folder")
        package.start_run.assert_called_once_with(run_name="r")
        workers = {"generation_logger_metrics": {"pending": {0: [1.0, 2.0, 3.0], 1: [4.0, 6.0]}}, "loss": 0.5}
        backend.log_metrics(workers, step=7)
        figure = MagicMock(spec=["savefig"])
        backend.log_plot(figure, 7, "p")
    (row,), options = package.log_metrics.call_args
    pending = {
        f"generation_logger_metrics/pending/{key}": value
        for key, value in {"mean": 3.2, "p50": 3.0, "p90": 5.2, "max": 6.0}.items()
    }
    assert row == pytest.approx({"loss": 0.5, **pending}) and options == {"step": 7, "run_id": backend.run_id}
    package.log_figure.assert_called_once_with(figure, "plots/p.png", save_kwargs={"bbox_inches": "tight"})


@pytest.mark.parametrize("value, scalar", [
    (42, 42), (True, True), ("text", "text"), (np.float32(1.5), 1.5), (np.array([42]), 42), (np.array([1, 2]), None),
    (torch.tensor(3), 3), (torch.tensor([99]), 99), (torch.tensor([1, 2]), None), ({"a": 1}, None), ([1], None), (None, None),
])  # fmt: skip
def test_what_counts_as_a_scalar(value, scalar):
    assert TensorboardLogger._coerce_to_scalar(value) == scalar


def test_tensorboard_calls():
    with patch.object(module, "SummaryWriter") as writer:
        backend = TensorboardLogger({}, log_dir="events")
        writer.assert_called_once_with(log_dir="events")
        backend.log_metrics({"loss": np.float32(0.5), "list": [1, 2], "note": "x"}, 10, "train")
        backend.log_hyperparams({"lr": 0.1, "model": {"size": 8}})
    writer.return_value.add_scalar.assert_called_once_with("train/loss", 0.5, 10)
    assert writer.return_value.add_hparams.call_args.args[0] == {"lr": 0.1, "model.size": 8}


def test_timer_files_and_the_slowest_worker(tmp_path):
    first, second = Timer(), Timer()
    for seconds in (1.0, 2.0):
        first.record("load", seconds)
    second.record("load", 2.5)
    second.record("init", 1.0)
    first.save_to_json(tmp_path / "deep" / "t.json", metadata={"rank": 0})
    assert json.loads((tmp_path / "deep" / "t.json").read_text()) == {
        "timings": {"load": 3.0},
        "reduction_op": "sum",
        "metadata": {"rank": 0},
    }
    assert Timer.aggregate_max([first, second]) == {"load": 3.0, "init": 1.0}
    assert Timer.aggregate_max([first, second], reduction_op="max") == {"load": 2.5, "init": 1.0}
    assert Timer.aggregate_max([]) == {}
