"""A damaged checkpoint costs that checkpoint alone; nothing in one is run, followed outside it or waited for."""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
from nemo_rl_cpp.algorithms.checkpointing import find_resume
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.files.durable import folder_problem, seal_folder


def manager_at(root, **config):
    return CheckpointManager({"checkpoint_dir": str(root / "ck"), "save_period": 1, "keep_top_k": 2, **config})


def save(manager, step):
    with manager.saving(step, {"total_steps": step}, {"a": step}) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "w.bin").write_bytes(bytes([step]) * 100)


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch):
    """Nothing here loses power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def three(tmp_path):
    manager = manager_at(tmp_path, keep_top_k=None)
    for step in (1, 2, 3):
        save(manager, step)
    return tmp_path


def flip_first_byte(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def other_digit(path):
    """Well-formed as before, but for a number; of the same size."""
    content = path.read_bytes()
    path.write_bytes(
        re.sub(rb"\d(?=\D*$)", lambda digit: b"%d" % (9 - int(digit[0])), content)
        if re.search(rb"\d", content)
        else b"0" * len(content)
    )


def make_gone(path):
    path.unlink()


def make_binary(path):
    path.write_bytes(b"\xff\xfe" * 50)


def make_escape(path):
    manifest = {"files": {"../../../etc/passwd": {"size": 1, "sha256": "x"}}}
    path.write_text(json.dumps(manifest))


def make_wrong_types(path):
    path.write_text('{"files": {"training_info.json": 5}, "digest": "x"}')


def make_zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def make_empty(path):
    path.write_bytes(b"")


DAMAGE = [flip_first_byte, other_digit, make_gone, make_binary, make_escape, make_wrong_types, make_zeros, make_empty]


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["training_info.json", "manifest.json", "config.yaml", "policy/w.bin"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_old_checkpoint_does_not_affect_resuming_or_later_saves(three, name, damage):
    """Both resuming and a running run's next saves, which thin out the old ones, go on."""
    damage(three / "ck" / "step_1" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = manager_at(three)
        assert manager.get_latest_checkpoint_path().endswith("step_3")
        for step in (4, 5):
            save(manager, step)
        assert manager.get_latest_checkpoint_path().endswith("step_5")
        assert folder_problem(Path(manager.get_latest_checkpoint_path()), contents=True) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_skips_a_damaged_newest_checkpoint(three, damage):
    for name in ("training_info.json", "config.yaml", "policy/w.bin"):
        damage(three / "ck" / "step_3" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_resume(manager_at(three)).path.name == "step_2"


def test_resume_fails_if_every_checkpoint_is_damaged(three):
    for step in (1, 2, 3):
        flip_first_byte(three / "ck" / f"step_{step}" / "policy" / "w.bin")
    (three / "ck" / "step_3" / "manifest.json").write_text("{")
    for _ in range(2):  # the second time one of them is set aside already
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ResumeError, match="no checkpoint of .* is whole .*step_1.*corrupt_step_3"):
                find_resume(manager_at(three))


def test_run_does_not_start_in_a_folder_with_checkpoints_of_other_programs(tmp_path):
    (tmp_path / "ck" / "step_5").mkdir(parents=True)
    (tmp_path / "ck" / "step_5" / "training_info.json").write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ResumeError, match="step_5"):
            find_resume(manager_at(tmp_path))


def test_leftover_of_a_killed_first_save_is_removed_and_not_resumed(tmp_path):
    (tmp_path / "ck" / "tmp_step_2").mkdir(parents=True)
    with pytest.warns(UserWarning, match="removed the left-over tmp_step_2"):
        assert find_resume(manager_at(tmp_path)).path is None


@pytest.mark.parametrize("mode, saved, error", [
    ("auto", False, None), ("auto", True, None), ("never", False, None), ("must", True, None),
    ("never", True, "resume=never, but .* holds checkpoints .the newest is step_3"), ("must", False, "resume=must, but .* holds no checkpoint"),
])  # fmt: skip
def test_resume_mode_decides_whether_a_checkpoint_is_required_or_forbidden(three, mode, saved, error):
    root = three if saved else three / "empty"
    if error is None:
        assert (find_resume(manager_at(root, resume=mode)).path is not None) == saved
    else:
        with pytest.raises(ResumeError, match=error):
            find_resume(manager_at(root, resume=mode))


def test_pruning_removes_symlinks_but_not_their_targets(three, tmp_path):
    """`step_1` and `tmp_step_9` may be links that a user made."""
    elsewhere = tmp_path / "elsewhere"
    os.rename(three / "ck" / "step_1", elsewhere)
    (three / "ck" / "step_1").symlink_to(elsewhere)
    (three / "ck" / "tmp_step_9").symlink_to(elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(manager_at(three), 4)
    assert sorted(p.name for p in (three / "ck").iterdir() if p.is_dir()) == ["step_3", "step_4"]
    assert folder_problem(elsewhere, contents=True) is None


def test_folders_with_similar_names_are_not_treated_as_checkpoints(three):
    for name in ("step_01", "step_٣", "step_-1", "tmp_step_02", "step_1_backup"):
        (three / "ck" / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager_at(three).get_latest_checkpoint_path().endswith("step_3")
    assert all((three / "ck" / name).is_dir() for name in ("step_01", "tmp_step_02", "step_1_backup"))


def test_manifest_that_lists_files_outside_its_folder_is_invalid(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "outside").write_text("x")
    (tmp_path / "a" / "f").symlink_to("../outside")
    seal_folder(tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    from nemo_rl_cpp.files.durable import _digest

    files = {"../outside": next(iter(manifest["files"].values()))}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({"files": files, "digest": _digest(files)}))
    assert "not inside the folder" in folder_problem(tmp_path / "a", contents=True)
