import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from nemo_rl_cpp.algorithms.checkpointing import find_resume
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files import durable


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch):
    """Nothing here loses power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def make(tmp_path):
    defaults = {"checkpoint_dir": str(tmp_path / "ckpt"), "metric_name": None, "save_period": 1, "keep_top_k": None}
    return lambda **config: CheckpointManager(CheckpointingConfig(**defaults | config))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "ckpt"


@pytest.fixture
def three(make, root):
    for step in (1, 2, 3):
        save(make(), step)
    return root


def save(manager, step, **info):
    with manager.saving(step, {"total_steps": step, **info}, {"grpo": {"seed": 42}}) as folder:
        (folder / "policy" / "weights").mkdir(parents=True)
        (folder / "policy" / "weights" / "model.safetensors").write_bytes(bytes([step]) * 1000)
    return manager.checkpoint_dir / f"step_{step}"


def names(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_saved_checkpoint_contains_its_files_manifest_and_status(make, root):
    manager = make()
    assert manager.get_latest_checkpoint_path() is None
    folder = save(manager, 3, val_reward=np.float32(0.5), bad=float("nan"))
    info = {"total_steps": 3, "val_reward": 0.5, "bad": "nan"}
    assert json.loads((folder / "training_info.json").read_text()) == manager.load_training_info(folder) == info
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"grpo": {"seed": 42}}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["files"]["policy/weights/model.safetensors"]["size"] == 1000
    assert set(manifest["files"]) == {"training_info.json", "config.yaml", "policy/weights/model.safetensors"}
    assert json.loads((root / "latest_checkpoint_status.json").read_text())["latest_step"] == 3
    assert manager.get_latest_checkpoint_path() == str(folder)
    save(manager, 3, note="second")  # replaces it
    assert manager.load_training_info(folder)["note"] == "second" and names(root) == ["step_3"]


def test_exception_while_saving_leaves_no_partial_checkpoint(make, root):
    manager = make()
    save(manager, 1)
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        with pytest.raises(type(error)) as caught, manager.saving(2, {}) as folder:
            (folder / "half").write_text("x")
            raise error
    assert any("step 2" in note for note in caught.value.__notes__)
    assert names(root) == ["step_1"]
    save(manager, 2)


def test_saving_into_the_checkpoint_folder_of_another_process_is_an_error(make):
    manager, other = make(), make()
    with manager.saving(1, {}) as folder:
        with pytest.raises(RuntimeError, match="checkpointing.checkpoint_dir of its own"), other.saving(2, {}):
            pass
        other.recover()
        assert folder.exists()
    save(other, 2)


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
def test_old_checkpoints_are_deleted_according_to_the_configured_retention_limits(make, root, case):
    settings, metrics, kept = KEPT[case]
    manager, there = make(**settings), []
    for step, value in metrics.items():
        save(manager, step, **({} if value is None else {settings["metric_name"]: value}))
        assert set(manager.removed) == {*there, f"step_{step}"} - set(there := names(root))
    assert names(root) == [f"step_{step}" for step in kept]


def test_reason_of_a_checkpoint_save_is_the_setting_or_event_that_triggered_the_save(make):
    manager = make(save_period=10, ft_save_period=4)
    assert [manager.save_reason(step) for step in (7, 8, 10)] == [None, "ft_save_period", "save_period"]
    for event, reason in (("is_last", "last_step"), ("early_stop",) * 2, ("timeout",) * 2, ("interrupted",) * 2):
        assert manager.save_reason(7, **{event: True}) == reason
    assert manager.save_reason(10, interrupted=True) == "interrupted"
    assert make(enabled=False).save_reason(10, is_last=True) is None


def test_newest_checkpoint_is_selected_only_among_complete_undamaged_folders(three, make):
    save(make(), 4)
    (three / "step_3" / "policy" / "weights" / "model.safetensors").write_bytes(b"\x09" * 1000)  # of the same size
    (three / "step_4" / "manifest.json").unlink()
    for name in ("tmp_step_5", "step_x"):
        (three / name).mkdir()
    with pytest.warns(UserWarning) as warned:
        assert make().get_latest_checkpoint_path() == str(three / "step_2")
    texts = " ".join(str(w.message) for w in warned)
    assert "removed the left-over tmp_step_5" in texts
    assert "left step_4 as it is: it has no manifest.json" in texts
    assert "step_3 is passed over: the content of policy/weights/model.safetensors does not match" in texts
    assert names(three) == ["step_1", "step_2", "step_3", "step_4", "step_x"]


def test_checkpoints_written_by_other_programs_are_ignored_and_never_overwritten(make, root):
    """NeMo RL writes folders of the same names, by default into the same place."""
    manager = make()
    for name in ("step_1", "corrupt_step_1"):
        (root / name).mkdir(parents=True)
        (root / name / "training_info.json").write_text(name)
    with pytest.warns(UserWarning, match="left step_1 as it is"), pytest.raises(ResumeError, match="step_1"):
        find_resume(manager)
    with pytest.warns(UserWarning, match="left step_1 as it is"):
        save(manager, 1)
    assert manager.get_latest_checkpoint_path().endswith("step_1")
    assert (root / "corrupt_step_1" / "training_info.json").read_text() == "corrupt_step_1"
    assert (root / "corrupt_step_1_2" / "training_info.json").read_text() == "step_1"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {}, "digest": "x"}'])
def test_checkpoint_with_a_truncated_manifest_is_renamed_and_not_used_for_resuming(three, make, content):
    (three / "step_3" / "manifest.json").write_text(content)
    with pytest.warns(UserWarning, match="set step_3 aside"):
        assert make().get_latest_checkpoint_path().endswith("step_2")


def flip_first_byte(content):
    return bytes([content[0] ^ 1]) + content[1:]


def other_digit(content):
    """Well-formed as before, but for a number; of the same size."""
    changed = re.sub(rb"\d(?=\D*$)", lambda digit: b"%d" % (9 - int(digit[0])), content)
    return changed if changed != content else b"0" * len(content)


DAMAGE = {
    "first byte": flip_first_byte, "digit": other_digit, "gone": lambda content: None,
    "binary": lambda content: b"\xff\xfe" * 50,
    "escape": lambda content: b'{"files": {"../../../etc/passwd": {"size": 1, "sha256": "x"}}}',
    "wrong types": lambda content: b'{"files": {"training_info.json": 5}, "digest": "x"}',
    "zeros": lambda content: bytes(len(content)), "empty": lambda content: b"",
}  # fmt: skip
FILES = ("training_info.json", "manifest.json", "config.yaml", "policy/weights/model.safetensors")


def damage(path, kind):
    content = DAMAGE[kind](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_older_checkpoint_does_not_prevent_resuming_or_saving(three, make, name, kind):
    damage(three / "step_1" / name, kind)
    manager = make(keep_top_k=2)
    assert manager.get_latest_checkpoint_path().endswith("step_3")
    for step in (4, 5):
        save(manager, step)
    assert manager.get_latest_checkpoint_path().endswith("step_5")
    assert durable.folder_problem(Path(manager.get_latest_checkpoint_path()), contents=True) is None


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", DAMAGE)
def test_resume_uses_the_previous_checkpoint_if_the_newest_is_damaged(three, make, kind):
    for name in FILES[:1] + FILES[2:]:
        damage(three / "step_3" / name, kind)
    assert find_resume(make()).path.name == "step_2"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resume_fails_if_every_checkpoint_is_damaged(three, make):
    for step in (1, 2, 3):
        damage(three / f"step_{step}" / FILES[-1], "first byte")
    (three / "step_3" / "manifest.json").write_text("{")
    for _ in range(2):  # the second time one of them is set aside already
        with pytest.raises(ResumeError, match="no checkpoint of .* is whole .*step_1.*corrupt_step_3"):
            find_resume(make())


@pytest.mark.parametrize("mode, saved, error", [
    ("auto", False, None), ("auto", True, None), ("never", False, None), ("must", True, None),
    ("never", True, "resume=never, but .* holds checkpoints .the newest is step_3"), ("must", False, "resume=must, but .* holds no checkpoint"),
])  # fmt: skip
def test_resume_setting_decides_whether_a_checkpoint_is_required_or_forbidden(three, make, mode, saved, error):
    manager = make(resume=mode, checkpoint_dir=str(three if saved else three / "empty"))
    if error is None:
        assert (find_resume(manager).path is not None) == saved
    else:
        with pytest.raises(ResumeError, match=error):
            find_resume(manager)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_deleting_old_checkpoints_removes_symlinks_but_not_their_targets(three, make, tmp_path):
    """`step_1` and `tmp_step_9` may be links that a user made."""
    elsewhere = tmp_path / "elsewhere"
    os.rename(three / "step_1", elsewhere)
    (three / "step_1").symlink_to(elsewhere)
    (three / "tmp_step_9").symlink_to(elsewhere)
    save(make(keep_top_k=2), 4)
    assert names(three) == ["step_3", "step_4"]
    assert durable.folder_problem(elsewhere, contents=True) is None


@pytest.mark.filterwarnings("error")
def test_folders_whose_names_resemble_step_n_are_not_treated_as_checkpoints(three, make):
    similar = ["step_01", "step_٣", "step_-1", "tmp_step_02", "step_1_backup"]
    for name in similar:
        (three / name).mkdir()
    assert make().get_latest_checkpoint_path().endswith("step_3")
    assert set(similar) < set(names(three))


def test_checkpoint_manifest_that_lists_files_outside_its_folder_is_invalid(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "outside").write_text("x")
    (tmp_path / "a" / "f").symlink_to("../outside")
    files = {"../outside": durable.seal_folder(tmp_path / "a")["files"]["f"]}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({"files": files, "digest": durable._digest(files)}))
    assert "not inside the folder" in durable.folder_problem(tmp_path / "a", contents=True)
