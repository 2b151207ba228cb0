import posixpath
import re
import socket
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from nemo_rl_cpp.config.logger import LoggerConfig
from nemo_rl_cpp.loggers.backends import check_trackers
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.metrics.memory import RayGpuMonitorLogger, _host_metrics, parse_gpu_table


def config(tmp_path, **extra):
    return LoggerConfig(**{"log_dir": str(tmp_path), "tensorboard_enabled": False, "monitor_gpus": False, **extra})


@pytest.fixture
def fake(monkeypatch):
    """Return a function that replaces a tracker's package by a mock. `run` of the mock is the run that `init`
    starts."""

    def install(name):
        module = MagicMock()
        module.init.return_value = module.run
        module.run.id, module.run.name = "run-1", "n-1"
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


@pytest.mark.slow
def test_wandb_run_id_is_kept_on_resume_unless_already_logged_steps_are_repeated(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    section = {"project": "p", "name": "n", "log_nemo_gym_full_result_tables": False}
    cfg = config(tmp_path, wandb_enabled=True, wandb=section)
    with Logger(cfg) as logger:
        first = logger.wandb_logger.run.id
        logger.log_hyperparams({"grpo": {"seed": 42}})
        logger.log_metrics({"loss": 0.5}, 1, prefix="train")
        logger.log_metrics({"total_step_time": 2.0}, 1, prefix="timing/train", step_finished=True)
        logger.log_histogram([1.0, 1.0], 1, "train/same")
        logger.log_histogram([1.0, 2.0], 1, "train/h")
        summary = dict(logger.wandb_logger.run.summary)
        assert logger.wandb_logger.run.config["grpo"]["seed"] == 42
    assert summary["train/loss"] == 0.5 and summary["timing/train/total_step_time"] == 2.0
    assert list((tmp_path / "wandb").rglob("*.wandb"))
    with Logger(cfg) as logger:
        assert logger.wandb_logger.run.id == first
        logger.log_metrics({"loss": 0.25}, 2, prefix="train")
    with Logger(cfg) as logger:
        logger.truncate_after(1)
        assert logger.wandb_logger.run.id != first, "step 2 stays in the first run"
        assert logger.wandb_logger.run.config["resumed_from"] == f"{first}, step 1"
        logger.log_metrics({"reward": 1.0}, 2, prefix="train", step_finished=True)
        summary = dict(logger.wandb_logger.run.summary)
        assert summary["train/loss"] == 0.5 and summary["train/reward"] == 1.0


def test_mlflow_receives_metrics_and_hyperparameters(tmp_path, fake):
    mlflow = fake("mlflow")
    mlflow.start_run.return_value.info.run_id = "run-1"
    section = {"experiment_name": "e", "run_name": "r", "tracking_uri": "sqlite:///x.db"}
    with Logger(config(tmp_path, mlflow_enabled=True, mlflow=section)) as logger:
        logger.log_metrics({"loss": 0.5, "lens": [1, 2, 3, 4], "nested": {"a": 1}, "text": "x"}, 3, prefix="train")
        logger.log_hyperparams({"a": {"b": [1, 2]}})
    mlflow.set_tracking_uri.assert_called_once_with("sqlite:///x.db")
    mlflow.start_run.assert_called_once_with(run_name="r")
    lens = {"mean": 2.5, "p50": 2.5, "p90": pytest.approx(3.7), "max": 4.0}
    row = {"train/loss": 0.5, "train/nested/a": 1.0} | {f"train/lens/{name}": value for name, value in lens.items()}
    mlflow.log_metrics.assert_called_once_with(row, step=3, run_id="run-1")
    mlflow.log_params.assert_called_once_with({"a.b.0": 1, "a.b.1": 2}, run_id="run-1")
    assert mlflow.end_run.called
    Logger(config(tmp_path, mlflow_enabled=True, mlflow=section)).finish()
    assert mlflow.start_run.call_args == call(run_id="run-1"), "a resumed run continues its own MLflow run"


def test_swanlab_and_trackio_receive_metrics_and_hyperparameters(tmp_path, fake):
    swanlab, trackio = fake("swanlab"), fake("trackio")
    sections = {"swanlab": {"project": "p", "name": "n"}, "trackio": {"project": "q", "name": "n"}}
    cfg = config(tmp_path, swanlab_enabled=True, trackio_enabled=True, **sections)
    with Logger(cfg) as logger:
        logger.log_metrics({"loss": 0.5, "text": "x"}, 2, prefix="train")
        logger.log_hyperparams({"a": 1})
    given = {"project": "p", "name": "n", "logdir": str(tmp_path / "swanlab")}
    swanlab.init.assert_called_once_with(**given)
    trackio.init.assert_called_once_with(project="q", name="n")
    for log in (swanlab.run.log, trackio.run.log):
        log.assert_called_once_with({"train/loss": 0.5}, step=2)
    logger.finish()
    assert swanlab.finish.call_count == trackio.finish.call_count == 1
    Logger(cfg).finish()
    assert swanlab.init.call_args == call(**given, id="run-1", resume="allow")
    assert trackio.init.call_args == call(project="q", name="n-1", resume="allow")


def check_name(name):
    """Raise RuntimeError for a name that MLflow 3 rejects."""
    normal = posixpath.normpath(name)
    if not re.fullmatch(r"[/\w.\- :]+", name) or len(name) > 250 or normal != name or normal[0] in "/.":
        raise RuntimeError(f"Invalid value {name!r}")


@pytest.fixture
def mlflow(monkeypatch):
    """Return a fake MLflow with runs in memory. Like MLflow 3 it rejects invalid names and changed parameters."""
    module = MagicMock(runs=[], uri=None, used=set(), active_run=lambda: None)

    def start_run(run_id=None, tags=None, **_):
        if run_id is None:
            run_id = str(len(module.runs))
            module.runs.append(SimpleNamespace(params={}, curves={}, tags=tags or {}))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, experiment_id="0"))

    def log_params(params, run_id):
        module.used.add(module.uri)
        known = module.runs[int(run_id)].params
        for name, value in params.items():
            check_name(name)
            if known.setdefault(name, str(value)) != str(value):
                raise RuntimeError(f"Changing param values is not allowed: {name}")

    def log_metrics(row, step, run_id):
        module.used.add(module.uri)
        for name, value in row.items():
            check_name(name)
            module.runs[int(run_id)].curves.setdefault(name, []).append((step, value))

    module.start_run, module.log_params, module.log_metrics = start_run, log_params, log_metrics
    module.set_tracking_uri, module.get_tracking_uri = partial(setattr, module, "uri"), lambda: module.uri
    module.end_run = lambda: module.used.add(module.uri)
    module.get_run = lambda run_id: SimpleNamespace(data=module.runs[int(run_id)])
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return module


NAMES = ["exact match (strict)", "größe", "長さ", "n" * 300, "a\nb", "\ud800", "b/", "/c", "d//e", "../f", "./g", "h%"]


@pytest.mark.filterwarnings("error")
def test_metric_names_invalid_in_mlflow_are_renamed_and_logged(tmp_path, mlflow):
    with Logger(config(tmp_path, mlflow_enabled=True)) as logger:
        logger.log_metrics({name: float(i) for i, name in enumerate(NAMES)} | {"loss": 0.5}, 1, prefix="train")
        logger.log_hyperparams({"env": {"exact match (strict)": 1}, "seed": 2})
    curves, params = mlflow.runs[0].curves, mlflow.runs[0].params
    assert curves["train/loss"] == [(1, 0.5)] and curves["train/größe"] == [(1, float(NAMES.index("größe")))]
    assert curves["train/exact match _strict_"] == [(1, 0.0)] and len(curves) == len(NAMES) + 1
    assert params["seed"] == "2" and len(params) == 2


@pytest.mark.filterwarnings("error")
def test_resumed_mlflow_run_logs_changed_parameters_under_new_names(tmp_path, mlflow):
    def resume(step, params):
        with Logger(config(tmp_path, mlflow_enabled=True)) as logger:
            if step:
                logger.truncate_after(step)
            logger.log_hyperparams(params)

    long = "n" * 249
    resume(0, {"lr": 0.1, "seed": 1, long: 1})
    resume(5, {"lr": 0.2, "seed": 1, "new": 3, long: 2})
    resume(5, {"lr": 0.2, "seed": 1, "new": 3, long: 2})
    resume(7, {"lr": 0.1, "seed": 1, "new": 3, long: 2})
    resume(7, {"lr": 0.3, "seed": 1, "new": 3, long: 2})
    assert [run.params for run in mlflow.runs] == [
        {
            "lr": "0.1", "seed": "1", "new": "3", "lr.from_step_5": "0.2", "lr.from_step_7": "0.1", "lr.from_step_7.2": "0.3",
            long: "1", f"{long[:220]}.from_step_5": "2",
        }
    ]  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_metrics_have_one_value_per_step_in_trackers_after_resuming_from_an_older_checkpoint(tmp_path, mlflow, fake):
    trackio, swanlab = fake("trackio"), fake("swanlab")
    cfg = config(tmp_path, mlflow_enabled=True, trackio_enabled=True, trackio={"project": "q"}, swanlab_enabled=True)
    with Logger(cfg) as logger:
        for step in range(1, 6):
            logger.log_metrics({"loss": float(step), "gap": float("inf"), "lens": [step, step]}, step, prefix="train")
    with Logger(cfg) as logger:
        logger.truncate_after(3)
        logger.log_metrics({"loss": 9.0}, 4, prefix="train")
    old, new = mlflow.runs
    assert old.curves["train/loss"] == [(step, float(step)) for step in range(1, 6)], "the old run stays"
    assert new.curves["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 9.0)]
    assert new.curves["train/gap"] == [(step, float("inf")) for step in (1, 2, 3)]
    assert new.curves["train/lens/mean"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert new.tags == {"resumed_from": "0, step 3"}
    assert trackio.init.call_args.kwargs["name"] == "n-1-from-step-3"
    assert ["id" in each.kwargs for each in swanlab.init.call_args_list] == [False, True, False]  # continued, then new
    for log in (trackio.run.log, swanlab.run.log):
        assert [each.kwargs["step"] for each in log.call_args_list] == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    with Logger(cfg) as logger:
        logger.truncate_after(4)
    assert len(mlflow.runs) == 2, "nothing later was logged: the same run continues"


def test_tracker_configuration_takes_precedence_over_environment_variables(tmp_path, mlflow, fake, monkeypatch):
    wandb = fake("wandb")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "offline")

    def start(**sections):
        Logger(config(tmp_path, mlflow_enabled=True, wandb_enabled=True, **sections)).finish()
        return mlflow.uri, wandb.init.call_args.kwargs

    assert start(mlflow={}, wandb={"project": "grpo-dev", "name": "n"}) == (
        "sqlite:///mine.db", {"name": "n", "dir": str(tmp_path / "wandb")},
    )  # fmt: skip
    given = {"project": "p", "name": "n", "mode": "online", "id": "run-1", "resume": "allow"}
    assert start(mlflow={"tracking_uri": "sqlite:///given.db"}, wandb={"project": "p", "name": "n", "mode": "online"}) == (
        "sqlite:///given.db", given | {"dir": str(tmp_path / "wandb")},
    )  # fmt: skip


def test_metrics_go_to_the_configured_mlflow_server_even_if_user_code_sets_another_server(tmp_path, mlflow):
    cfg = config(tmp_path, mlflow_enabled=True, mlflow={"tracking_uri": "sqlite:///given.db"})
    with Logger(cfg) as logger:
        mlflow.set_tracking_uri("sqlite:///of-a-judge.db")
        logger.log_metrics({"loss": 0.5}, 1, prefix="train")
        logger.log_hyperparams({"lr": 0.1})
    assert mlflow.used == {"sqlite:///given.db"} and mlflow.uri == "sqlite:///of-a-judge.db"


@pytest.mark.parametrize("proxied", [False, True])
def test_unreachable_mlflow_server_is_an_error_that_names_the_key(monkeypatch, proxied):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if proxied:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not asked for this machine

    def check(port):
        uri = f"http://127.0.0.1:{port}"
        check_trackers(LoggerConfig(mlflow_enabled=True, mlflow={"tracking_uri": uri.replace("//", "//me:secret@")}))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = taken.getsockname()[1]
        refused = f"logger.mlflow.tracking_uri.*no server answers at http://127.0.0.1:{port}"
        with pytest.raises(ValueError, match=refused):
            check(port)
        taken.listen()
        check(port)


def test_failing_experiment_tracker_does_not_end_the_run(tmp_path, fake):
    trackio = fake("trackio")
    trackio.run.log.side_effect = ConnectionError("no route to host")
    logger = Logger(config(tmp_path, trackio_enabled=True, trackio={"project": "q"}))
    with pytest.warns(UserWarning, match="TrackioLogger failed .no route to host.: the run continues") as warned:
        logger.log_metrics({"a": 1}, 1)
        logger.log_metrics({"a": 2}, 2)
    assert len(warned) == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_gpu_metrics_are_logged_by_time_in_a_separate_file(tmp_path, monkeypatch):
    table = "0, 93, 20480\n1, [N/A], 1024\n"
    parsed = {"node.0.gpu.0.util": 93.0, "node.0.gpu.0.mem_gb": 20.0, "node.0.gpu.1.mem_gb": 1.0}
    assert parse_gpu_table(table) == parsed
    logger = Logger(config(tmp_path))
    monitor = RayGpuMonitorLogger(0.001, 0.001, parent_logger=logger)
    monkeypatch.setattr(monitor, "_gpu_metrics", lambda: parse_gpu_table(table))
    monitor.metrics_buffer.append((12, monitor._gpu_metrics() | _host_metrics()))
    monitor.stop()
    line = (tmp_path / "system.jsonl").read_text()
    assert '"step": 12' in line and '"ray/node.0.gpu.0.util": 93.0' in line and '"ray/ray_step": 12' in line
    assert "ray/node.0.mem_total_gb" in line and not (tmp_path / "metrics.jsonl").exists()


def test_gpu_monitoring_without_a_gpu_starts_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.metrics.memory.shutil.which", lambda name: None)
    assert Logger(config(tmp_path, monitor_gpus=True)).gpu_monitor is None
