"""Kills a save at every system call that changes the disk and checks that a whole checkpoint is always found.

A killed process is a forked child that ends in os._exit before the call. For a power cut, files and folder entries that
were not synced are lost: every file that was not synced since its last write is emptied."""

import errno
import os
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files.durable import folder_problem

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open", "write")
KILLED = 77


def manager_at(root, **config):
    defaults = {"checkpoint_dir": str(root), "metric_name": None, "save_period": 1, "keep_top_k": 1}
    return CheckpointManager(CheckpointingConfig(**defaults | config))


def save(manager, step, mark):
    with manager.saving(step, {"mark": mark}, {"key": "value"}) as folder:
        for part in ("policy/weights", "policy/optimizer", "trainer_state"):
            (folder / part).mkdir(parents=True)
            with open(folder / part / "data.bin", "wb", buffering=0) as file:
                file.write(mark.encode() * 50)


class Fault:
    """Counts the calls of `os` (and file writes) and acts before number `at`."""

    def __init__(self, at, act):
        self.at, self.act, self.count, self.synced = at, act, 0, {}

    def install(self, monkeypatch):
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        return self

    def wrap(self, name, original):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                self.act(self)
            if name == "fsync":
                facts = os.fstat(args[0])
                self.synced[facts.st_ino] = (facts.st_size, facts.st_mtime_ns)
            return original(*args, **kwargs)

        return call


def kill(fault):
    os._exit(KILLED)


def fail_full(fault):
    raise OSError(errno.ENOSPC, "No space left on device")


def lose_power(root):
    def act(fault):
        original_open = open
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                facts = os.stat(path)
                known = fault.before.get(facts.st_ino) == (facts.st_size, facts.st_mtime_ns)
                if not known and fault.synced.get(facts.st_ino) != (facts.st_size, facts.st_mtime_ns):
                    original_open(path, "wb").close()
        os._exit(KILLED)

    return act


def state_of_files(root):
    entries = {}
    for folder, _, names in os.walk(root):
        for name in names:
            facts = os.stat(os.path.join(folder, name))
            entries[facts.st_ino] = (facts.st_size, facts.st_mtime_ns)
    return entries


def run_child(root, at, act, step, mark):
    """Saves in a child that dies at call `at`; True when it lived."""
    before = state_of_files(root)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fault = Fault(at, act)
            fault.before = before
            with pytest.MonkeyPatch.context() as patch:
                fault.install(patch)
                save(manager_at(root), step, mark)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), f"the child failed at call {at}"
    return code == 0


def check_resume(root, old, new):
    """The latest checkpoint is whole and is `old` or `new` (step, mark); the next save works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = manager_at(root)
        latest = manager.get_latest_checkpoint_path()
        assert latest is not None
        assert folder_problem(manager.checkpoint_dir / os.path.basename(latest), contents=True) is None
        step = int(latest.rsplit("_", 1)[1])
        mark = manager.load_training_info(latest)["mark"]
        assert (step, mark) in (old, new)
        names = {name for name in os.listdir(root) if not name.startswith((".", "latest"))}
        assert all(name.startswith("step_") for name in names), names
        save(manager, 9, "next")
        assert manager.get_latest_checkpoint_path().endswith("step_9")
    return step, mark


@pytest.fixture(autouse=True)
def fast_fsync(monkeypatch):
    """Nothing here loses power in earnest: the calls are counted, the waiting for the disk is left out."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def filling(folder):
    """What makes a folder with two saves behind it."""
    manager = manager_at(folder / "template")
    save(manager, 1, "one")
    save(manager, 2, "two")
    return lambda root: shutil.copytree(manager.checkpoint_dir, root)


@pytest.fixture
def fill(tmp_path):
    return filling(tmp_path)


@pytest.fixture(scope="module")
def elsewhere():
    """Call a function in a process without torch, which takes less time to fork than to save."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def die_at_every_call(folder: Path, death: str, step: int, mark: str) -> tuple[int, bool, set]:
    """The last call, whether the save lived to its end, and the checkpoints that were found."""
    os.fsync = lambda descriptor: None  # as `fast_fsync` does
    fill, outcomes = filling(folder), set()
    for at in range(1, 2000):
        root = folder / f"run{at}"
        fill(root)
        act = kill if death == "killed" else lose_power(root)
        lived = run_child(root, at, act, step, mark)
        outcomes.add(check_resume(root, (2, "two"), (step, mark)))
        shutil.rmtree(root)
        if lived:
            break
    return at, lived, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("death", ["killed", "power"])
@pytest.mark.parametrize("step, mark", [(3, "three"), (2, "two again")], ids=["new_step", "same_step"])
def test_process_killed_at_any_call_of_a_save_leaves_a_complete_checkpoint(tmp_path, elsewhere, death, step, mark):
    at, lived, outcomes = elsewhere(die_at_every_call, tmp_path, death, step, mark)
    assert lived and at > 40, f"only {at} calls were seen: the fault injection does not reach the save"
    assert outcomes == {(2, "two"), (step, mark)}


@pytest.mark.slow
@pytest.mark.parametrize("step, mark", [(3, "three"), (2, "two again")], ids=["new_step", "same_step"])
def test_full_disk_at_any_system_call_of_a_save_leaves_a_complete_checkpoint(tmp_path, fill, step, mark):
    failed = 0
    for at in range(1, 2000):
        root = tmp_path / f"run{at}"
        fill(root)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fault = Fault(at, fail_full).install(patch)
            manager = manager_at(root)
            try:
                save(manager, step, mark)
            except (OSError, RuntimeError):
                failed += 1
                patch.undo()
                assert not any(name.startswith("tmp_") for name in os.listdir(root)), at
        check_resume(root, (2, "two"), (step, mark))
        shutil.rmtree(root)
        if fault.count < at:
            break
    assert failed > 20


def test_process_killed_while_cleaning_up_an_interrupted_save_loses_no_checkpoint(tmp_path, monkeypatch, fill):
    for at in range(1, 500):
        root = tmp_path / f"run{at}"
        fill(root)
        os.rename(root / "step_2", root / "old_step_2")
        (root / "tmp_step_2").mkdir()
        (root / "tmp_step_2" / "half").write_text("x")
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                fault = Fault(at, kill).install(monkeypatch)
                manager_at(root).get_latest_checkpoint_path()
                os._exit(0 if fault.count < at else 1)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        check_resume(root, (2, "two"), (2, "two"))
        if code == 0:
            break
    assert code == 0 and at > 3
