"""The best checkpoint, and checkpoints that are finished in the background."""

import threading

import numpy as np
import pytest
from nemo_rl_cpp.compat.utils.checkpoint import CheckpointManager


def make(tmp_path, **config):
    return CheckpointManager({"checkpoint_dir": str(tmp_path / "ckpt"), "save_period": 1, **config})


def save(manager, step, **info):
    with manager.saving(step, {"total_steps": step, **info}, {"grpo": {"seed": 42}}) as folder:
        (folder / "policy" / "weights").mkdir(parents=True)
        (folder / "policy" / "weights" / "model.safetensors").write_bytes(bytes([step]) * 1000)
    return manager.checkpoint_dir / f"step_{step}"


def steps(manager):
    return sorted(int(p.name[5:]) for p in manager.checkpoint_dir.iterdir() if p.name.startswith("step_"))


def test_no_checkpoints_at_all(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy")
    assert manager.get_latest_checkpoint_path() is None
    assert manager.get_best_checkpoint_path() is None
    assert CheckpointManager.get_resume_paths(None) == (None, None)


def test_keep_top_k_by_metric_keeps_the_best_and_the_latest(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy", keep_top_k=2)
    for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.9, 0.2, 0.3], start=1):
        save(manager, step, **{"val:accuracy": accuracy})
    assert steps(manager) == [2, 4, 6]
    assert manager.get_best_checkpoint_path().endswith("step_4")


def test_keep_top_k_lower_is_better(tmp_path):
    manager = make(tmp_path, metric_name="train:loss", keep_top_k=1, higher_is_better=False)
    for step, loss in enumerate([0.3, 0.1, 0.1, 0.2], start=1):
        save(manager, step, **{"train:loss": loss})
    assert steps(manager) == [3, 4]
    assert manager.get_best_checkpoint_path().endswith("step_3")


def test_missing_and_nan_metrics_rank_last_and_are_never_best(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy", keep_top_k=1)
    save(manager, 1, **{"val:accuracy": -5.0})
    save(manager, 2, **{"val:accuracy": float("nan")})
    save(manager, 3)
    assert steps(manager) == [1, 3]
    with pytest.warns(UserWarning, match=r"Ignoring 1 checkpoint.*'val:accuracy' \(steps \[3\]\)"):
        assert manager.get_best_checkpoint_path().endswith("step_1")


def test_best_falls_back_to_the_latest(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy")
    save(manager, 1)
    save(manager, 2)
    with (
        pytest.warns(UserWarning, match="Ignoring 2 checkpoint"),
        pytest.warns(UserWarning, match="Returning latest checkpoint"),
    ):
        assert manager.get_best_checkpoint_path().endswith("step_2")


def test_background_finalization(tmp_path):
    manager = make(tmp_path)
    release = threading.Event()
    folder = manager.init_tmp_checkpoint(1, {})
    manager.begin_finalization(folder, wait_fn=release.wait)
    assert manager.has_pending_finalization and manager.get_latest_checkpoint_path() is None
    release.set()
    manager.finalize_pending()
    assert not manager.has_pending_finalization
    assert manager.get_latest_checkpoint_path().endswith("step_1")


def test_background_failure_is_raised_by_the_next_call(tmp_path):
    def fail():
        raise OSError(28, "No space left on device")

    manager = make(tmp_path)
    manager.begin_finalization(manager.init_tmp_checkpoint(1, {}), wait_fn=fail)
    with pytest.raises(RuntimeError, match="could not be finished: .*No space left"):
        manager.finalize_pending()
    with manager:
        save(manager, 2)
    assert steps(manager) == [2]


def test_checkpoint_metric(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy")
    assert manager.checkpoint_metric({"loss": 1}, {"accuracy": np.float64(0.25)}) == {"val:accuracy": 0.25}
    with pytest.warns(UserWarning, match="this step has no val metrics"):
        assert manager.checkpoint_metric({"loss": 1}, None) == {}
    with pytest.raises(ValueError, match="no 'accuracy'; there are avg_length"):
        manager.checkpoint_metric({}, {"avg_length": 3})
    assert make(tmp_path).checkpoint_metric({}, {}) == {}
