import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files.folder_lock import FolderError, FolderInUseError, FolderLock, holder_of

KEY = "checkpointing.checkpoint_dir"
HOLD = (
    "import sys, pathlib\nfrom nemo_rl_cpp.checkpoints.manager import CheckpointManager\n"
    "from nemo_rl_cpp.config.checkpointing import CheckpointingConfig\n"
    "manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=sys.argv[1]))\n"
    "manager.claim()\nprint('in', flush=True)\nsys.stdin.read()\n"
)


@pytest.fixture
def other(tmp_path):
    """Another process in tmp_path/ck."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "ck")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in\n"
    yield process
    process.kill()
    process.communicate()


def claim(folder):
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder)))
    manager.claim()
    return manager


def test_error_for_a_locked_folder_names_the_process_that_holds_the_lock(tmp_path, other):
    with pytest.raises(FolderInUseError) as caught:
        claim(tmp_path / "ck")
    text = str(caught.value)
    assert f"process {other.pid} on {socket.gethostname()}, since 2" in text and f"a {KEY} of its own" in text
    assert isinstance(caught.value, (ValueError, RuntimeError)) and "\n" not in text
    assert holder_of(tmp_path / "ck")["pid"] == other.pid


def test_folder_lock_is_released_if_its_process_is_killed(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert holder_of(tmp_path / "ck") is None
    claim(tmp_path / "ck").shutdown()


def test_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    lock = FolderLock(tmp_path, KEY)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        lock.close()
        FolderLock(tmp_path, KEY).close()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_folder_lock_is_kept_after_saving_a_checkpoint(tmp_path):
    manager = claim(tmp_path / "ck")
    with manager.saving(1, {}):
        pass
    with pytest.raises(FolderInUseError, match="by this very process"):
        claim(tmp_path / "ck")
    manager.shutdown()
    claim(tmp_path / "ck").shutdown()


def test_run_that_ends_before_its_first_checkpoint_leaves_no_checkpoint_folder(tmp_path):
    claim(tmp_path / "a" / "ck").shutdown()
    assert not (tmp_path / "a" / "ck").exists()
    (tmp_path / "mine").mkdir()
    claim(tmp_path / "mine").shutdown()
    assert (tmp_path / "mine").is_dir()


def test_run_shuts_down_without_error_if_its_locked_folder_was_deleted(tmp_path):
    manager = claim(tmp_path / "ck")
    shutil.rmtree(tmp_path / "ck")
    manager.shutdown()


@pytest.mark.parametrize("name", ["file", "file/below", "dangling", "x" * 300])
def test_error_for_a_folder_that_cannot_be_created_names_the_configuration_key(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FolderError, match=KEY):
        claim(tmp_path / name)


def test_error_for_a_read_only_checkpoint_folder_names_the_folder(monkeypatch, tmp_path):
    (tmp_path / "ck").mkdir()
    real = os.open

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FolderError, match="cannot be written .Read-only file system"):
        claim(tmp_path / "ck")


def test_file_system_without_locks_gives_a_warning(monkeypatch, tmp_path):
    def no_locks(descriptor, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no locks, so nothing would tell of a second run"):
        claim(tmp_path / "ck").shutdown()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff" * 9, json.dumps({"pid": "?"}).encode()])
def test_folder_stays_locked_if_its_lock_file_has_invalid_content(tmp_path, content):
    lock = FolderLock(tmp_path, KEY)
    (tmp_path / ".lock").write_bytes(content)
    with pytest.raises(FolderInUseError, match="in use by"):
        FolderLock(tmp_path, KEY)
    lock.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["link", "up/../ck", "./ck", "link/../ck"])
def test_folder_lock_also_applies_to_other_paths_to_the_same_folder(tmp_path, other, name, monkeypatch):
    (tmp_path / "up").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ck")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {other.pid} "):
        claim(name)
