import json

import numpy as np
import pytest
import yaml
from nemo_rl_cpp.checkpoints.manager import CheckpointManager


def make(tmp_path, **config):
    return CheckpointManager({"checkpoint_dir": str(tmp_path / "ckpt"), "save_period": 1, **config})


def save(manager, step, **info):
    with manager.saving(step, {"total_steps": step, **info}, {"grpo": {"seed": 42}}) as folder:
        (folder / "policy" / "weights").mkdir(parents=True)
        (folder / "policy" / "weights" / "model.safetensors").write_bytes(bytes([step]) * 1000)
    return manager.checkpoint_dir / f"step_{step}"


def steps(manager):
    return sorted(int(p.name[5:]) for p in manager.checkpoint_dir.iterdir() if p.name.startswith("step_"))


def test_saved_checkpoint_contains_its_files_manifest_and_status(tmp_path):
    manager = make(tmp_path)
    folder = save(manager, 3, val_reward=np.float32(0.5), bad=float("nan"))
    assert json.loads((folder / "training_info.json").read_text()) == {
        "total_steps": 3,
        "val_reward": 0.5,
        "bad": "nan",
    }
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"grpo": {"seed": 42}}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["files"]["policy/weights/model.safetensors"]["size"] == 1000
    assert set(manifest["files"]) == {"training_info.json", "config.yaml", "policy/weights/model.safetensors"}
    assert json.loads((manager.checkpoint_dir / "latest_checkpoint_status.json").read_text())["latest_step"] == 3
    assert manager.get_latest_checkpoint_path() == str(folder)
    assert manager.load_training_info(folder)["total_steps"] == 3


@pytest.mark.parametrize(
    "config, message",
    [
        ({"save_period": 0}, "checkpointing.save_period"),
        ({"keep_top_k": -1}, "checkpointing.keep_top_k"),
        ({"checkpoint_dir": ""}, "checkpointing.checkpoint_dir is empty"),
    ],
)
def test_invalid_checkpointing_settings_are_rejected_by_key(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **config)


def test_saving_the_same_step_again_replaces_it(tmp_path):
    manager = make(tmp_path)
    save(manager, 2, note="first")
    folder = save(manager, 2, note="second")
    assert manager.load_training_info(folder)["note"] == "second"
    assert sorted(p.name for p in manager.checkpoint_dir.iterdir() if p.is_dir()) == ["step_2"]


def test_exception_while_saving_leaves_no_partial_checkpoint(tmp_path):
    manager = make(tmp_path)
    save(manager, 1)
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        with pytest.raises(type(error)) as caught, manager.saving(2, {}) as folder:
            (folder / "half").write_text("x")
            raise error
    assert any("step 2" in note for note in caught.value.__notes__)
    assert sorted(p.name for p in manager.checkpoint_dir.iterdir() if p.is_dir()) == ["step_1"]
    save(manager, 2)


def test_latest_checkpoint_skips_damaged_and_incomplete_folders(tmp_path):
    manager = make(tmp_path)
    for step in (1, 2, 3, 4):
        save(manager, step)
    root = manager.checkpoint_dir
    (root / "step_3" / "policy" / "weights" / "model.safetensors").write_bytes(b"\x09" * 1000)  # same size, other bytes
    (root / "step_4" / "manifest.json").unlink()
    (root / "tmp_step_5").mkdir()
    (root / "step_x").mkdir()
    fresh = make(tmp_path)
    with pytest.warns(UserWarning) as warned:
        assert fresh.get_latest_checkpoint_path() == str(root / "step_2")
    texts = " ".join(str(w.message) for w in warned)
    assert "removed the left-over tmp_step_5" in texts
    assert "left step_4 as it is: it has no manifest.json" in texts
    assert "step_3 is passed over: the content of policy/weights/model.safetensors does not match" in texts
    assert (root / "step_4").is_dir() and not (root / "tmp_step_5").exists() and (root / "step_x").is_dir()


def test_checkpoints_of_other_programs_are_ignored_and_never_overwritten(tmp_path):
    """NeMo RL writes folders of the same names, by default into the same place."""
    manager = make(tmp_path)
    for name in ("step_1", "corrupt_step_1"):
        (manager.checkpoint_dir / name).mkdir(parents=True)
        (manager.checkpoint_dir / name / "training_info.json").write_text(name)
    with pytest.warns(UserWarning, match="left step_1 as it is"):
        assert manager.get_latest_checkpoint_path() is None
    with pytest.warns(UserWarning, match="left step_1 as it is"):
        save(manager, 1)
    assert manager.get_latest_checkpoint_path().endswith("step_1")
    assert (manager.checkpoint_dir / "corrupt_step_1" / "training_info.json").read_text() == "corrupt_step_1"
    assert (manager.checkpoint_dir / "corrupt_step_1_2" / "training_info.json").read_text() == "step_1"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {}, "digest": "x"}'])
def test_checkpoint_with_a_truncated_manifest_is_set_aside(tmp_path, content):
    manager = make(tmp_path)
    save(manager, 1)
    save(manager, 2)
    (manager.checkpoint_dir / "step_2" / "manifest.json").write_text(content)
    with pytest.warns(UserWarning, match="set step_2 aside"):
        assert manager.get_latest_checkpoint_path().endswith("step_1")


def test_latest_checkpoint_is_none_in_an_empty_folder(tmp_path):
    manager = make(tmp_path, metric_name="val:accuracy")
    assert manager.get_latest_checkpoint_path() is None
    assert CheckpointManager.get_resume_paths(None) == (None, None)


def test_resume_paths_name_weights_and_optimizer_of_each_component(tmp_path):
    step = tmp_path / "step_1"
    (step / "policy" / "weights").mkdir(parents=True)
    with pytest.warns(UserWarning, match="optimizer starts fresh"):
        assert CheckpointManager.get_resume_paths(step) == (step / "policy" / "weights", None)
    (step / "value" / "optimizer").mkdir(parents=True)
    expected = (step / "value" / "weights", step / "value" / "optimizer")
    assert CheckpointManager.get_resume_paths(str(step), model_component="value") == expected


NAN, BY_ACCURACY = float("nan"), {"metric_name": "val:accuracy"}
KEPT = {  # settings, {step: metric, None where it has none}, the steps that are kept
    "the best and the latest": (
        BY_ACCURACY | {"keep_top_k": 2}, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.2, 6: 0.3}, [2, 4, 6]),
    "lower is better": (
        {"metric_name": "train:loss", "keep_top_k": 1, "higher_is_better": False}, {1: 0.3, 2: 0.1, 3: 0.1, 4: 0.2}, [3, 4]),
    "missing and nan metrics rank last": (BY_ACCURACY | {"keep_top_k": 1}, {1: -5.0, 2: NAN, 3: None}, [1, 3]),
    "the newest without a metric": ({"keep_top_k": 2}, dict.fromkeys(range(1, 6)), [4, 5]),
    "off the period only as the latest": (
        {"keep_top_k": 5, "save_period": 10}, dict.fromkeys((10, 13, 20, 27)), [10, 20, 27]),
    "the latest ones off the period": (
        {"ft_keep_latest_k": 2, "save_period": 10}, dict.fromkeys((10, 11, 12, 13)), [10, 12, 13]),
    "all without a limit": ({"save_period": 10}, dict.fromkeys((1, 2, 3)), [1, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_old_checkpoints_are_deleted_according_to_the_configured_limits(tmp_path, case):
    settings, metrics, kept = KEPT[case]
    manager = make(tmp_path, **settings)
    for step, value in metrics.items():
        save(manager, step, **({} if value is None else {settings["metric_name"]: value}))
    assert steps(manager) == kept


def test_save_reason_names_the_setting_or_event_that_triggers_the_save(tmp_path):
    manager = make(tmp_path, save_period=10, ft_save_period=4)
    assert manager.save_reason(7) is None
    assert manager.save_reason(10) == "save_period"
    assert manager.save_reason(8) == "ft_save_period"
    assert manager.save_reason(7, is_last=True) == "last_step"
    assert manager.save_reason(7, early_stop=True) == "early_stop"
    assert manager.save_reason(7, timeout=True) == "timeout"
    assert manager.save_reason(10, interrupted=True) == "interrupted"
    assert make(tmp_path, enabled=False).save_reason(10, is_last=True) is None


def test_two_processes_cannot_save_into_one_folder(tmp_path):
    manager, other = make(tmp_path), make(tmp_path)
    with manager.saving(1, {}) as folder:
        with pytest.raises(RuntimeError, match="checkpointing.checkpoint_dir of its own"), other.saving(2, {}):
            pass
        assert other.recover() == [] and folder.exists()
    save(other, 2)
