"""The folder of checkpoints: it publishes finished checkpoints, repairs the folder after a crash, and lists complete
ones.

Names: `tmp_step_N` is being written, `step_N` is published, `old_step_N` is being replaced by a new `step_N`,
`del_step_N` is being removed, and `corrupt_step_N` is damaged but kept.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.files import durable
from nemo_rl_cpp.files.folder_lock import LOCK, FolderError, FolderLock, make_folder
from nemo_rl_cpp.files.yaml_text import Plain

TRAINING_INFO = "training_info.json"
STATUS = "latest_checkpoint_status.json"
_KEY = "checkpointing.checkpoint_dir"
_FOLDER = re.compile(r"(tmp_|old_|del_|)step_(0|[1-9]\d{0,17})", re.ASCII)
_ASIDE = re.compile(r"corrupt_step_\d+(_\d+)?", re.ASCII)


class CheckpointRecord(NamedTuple):
    """A complete checkpoint: its step, folder and training_info."""

    step: int
    path: Path
    info: dict[str, Plain]


class CheckpointStore:
    """File operations on the checkpoint folder `root`. All changes need the folder's lock, so that two processes cannot
    interfere. The lock is held for one save (`acquire` to `release`) or for a whole run (`claim` to `close`).

    Attributes:
        saving: whether this object is in the middle of a save.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock: FolderLock | None = None
        self._claimed = self._made = self.saving = False
        self._verified: dict[tuple[Path, int], str | None] = {}

    def claim(self) -> None:
        """Create the folder and lock it until `close`. Raise FolderError if another run holds the lock, or if the
        folder cannot be created or locked.
        """
        if not self._claimed:
            try:
                self._made = make_folder(self.root, _KEY)
                self._lock = self._lock or FolderLock(self.root, _KEY)
            except OSError as error:
                raise FolderError(
                    f"{_KEY}={self.root}: the run cannot have this folder ({error.strerror or error})"
                ) from error
            self._claimed = True

    def close(self) -> None:
        """Unlock the folder. Remove it if `claim` created it and it is still empty. Further calls do nothing."""
        lock, self._lock, made = self._lock, None, self._made
        self._claimed = self._made = self.saving = False
        if lock is None:
            return
        empty = made and self.root.is_dir() and [path.name for path in self.root.iterdir()] == [LOCK]
        lock.close(remove=empty)
        if empty:
            with contextlib.suppress(OSError):  # a file was added in the meantime
                self.root.rmdir()

    def acquire(self) -> None:
        """Lock the folder for a save. Raise FolderInUseError if another process holds the lock."""
        self._lock = self._lock or FolderLock(self.root, _KEY)
        self.saving = True

    def release(self) -> None:
        """End the save, and unlock the folder unless it is claimed. Further calls do nothing."""
        self.saving = False
        if self._lock is not None and not self._claimed:
            self._lock.close()
            self._lock = None

    def temporary(self, step: int) -> Path:
        """Return the absolute path of `tmp_step_N`."""
        return self.root / f"tmp_step_{step}"

    def make_temporary(self, step: int) -> None:
        """Free the name `tmp_step_N` if it is taken, and create an empty folder of this name."""
        self._make_way(self.temporary(step))
        self.temporary(step).mkdir()

    def _make_way(self, path: Path) -> None:
        """Free the name `path`: remove a folder, and rename anything else to a `corrupt_` name."""
        if path.is_dir() and not path.is_symlink():
            delete(path)
        elif os.path.lexists(path):
            warnings.warn(f"{self.root}: set {path.name} aside as {self._set_aside(path).name}", stacklevel=4)

    def publish(self, folder: Path) -> Path:
        """Rename a sealed `tmp_step_N` to `step_N` and return the new path. If this fails, an older
        `step_N` is kept.
        """
        step = step_of(folder, "tmp_")
        target, old = folder.with_name(f"step_{step}"), folder.with_name(f"old_step_{step}")
        if os.path.lexists(target) and not (target / durable.MANIFEST).is_file():
            self._set_aside(target)  # written by another program
        if target.exists():
            self._make_way(old)
        durable.publish_folder(folder, target, old)
        if old.exists():
            delete(old)
        return target

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint. Rename it first, so that a crash cannot leave a partial `step_N`."""
        doomed = folder.with_name(f"del_step_{step_of(folder, '')}")
        self._make_way(doomed)
        durable.rename(folder, doomed)
        delete(doomed)

    def recover(self) -> list[str]:
        """Finish or remove what a crash during a save has left. Warn about each action, and return the warnings."""
        done = [text for prefix, step, path in self.folders() if (text := self._recover_one(prefix, step, path))]
        for prefix, _, path in self.folders():
            if prefix == "" and (problem := self.quick_problem(path)) is not None:
                if os.path.lexists(path / durable.MANIFEST):
                    done.append(f"set {path.name} aside as {self._set_aside(path).name}: {problem}")
                else:  # written by another program such as NeMo RL
                    done.append(f"left {path.name} as it is: {problem}")
        for text in done:
            warnings.warn(f"{self.root}: {text}", stacklevel=4)
        return done

    def _set_aside(self, path: Path) -> Path:
        """Rename a folder step_N to `corrupt_step_N`, or if that exists to `corrupt_step_N_2`, `_3`, ..., and return
        the new path.
        """
        aside, number = path.with_name(f"corrupt_{path.name}"), 2
        while os.path.lexists(aside):
            aside, number = path.with_name(f"corrupt_{path.name}_{number}"), number + 1
        durable.rename(path, aside)
        return aside

    def _recover_one(self, prefix: str, step: int, path: Path) -> str | None:
        """Recover one folder and return a description of what was done, or None. `folders` lists tmp_step_N before
        old_step_N, so that an old_step_N is renamed back only if no newer folder could be published.
        """
        target = path.with_name(f"step_{step}")
        if prefix == "tmp_" and not path.is_symlink() and durable.folder_problem(path, contents=True) is None:
            self.publish(path)
            return f"published the finished {path.name}"
        if prefix == "old_" and not target.exists():
            durable.rename(path, target)
            return f"put {path.name} back as {target.name}"
        if prefix:
            with contextlib.suppress(OSError):
                delete(path)
            return f"removed the left-over {path.name}"
        return None

    def history(self) -> list[CheckpointRecord]:
        """Return every step_N whose files and sizes match its manifest and whose training_info can be read, in order of
        steps.
        """
        return [
            CheckpointRecord(step, path, json.loads((path / TRAINING_INFO).read_text(encoding="utf-8")))
            for prefix, step, path in self.folders()
            if prefix == "" and self.quick_problem(path) is None
        ]

    def quick_problem(self, path: Path) -> str | None:
        """Return a description of what is wrong with the checkpoint's manifest, file sizes or training_info, or None if
        they are valid.
        """
        problem = durable.folder_problem(path, contents=False, verify=(TRAINING_INFO,))
        if problem is not None:
            return problem
        try:
            info = json.loads((path / TRAINING_INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return f"{TRAINING_INFO} cannot be read ({error})"
        return None if isinstance(info, dict) else f"{TRAINING_INFO} holds no mapping"

    def unusable(self) -> list[str]:
        """Return the names of folders from which a run cannot resume: damaged folders, `corrupt_` folders, and folders
        of other programs.
        """
        found = [
            path.name
            for prefix, _, path in self.folders()
            if prefix == "" and (self.quick_problem(path) or self.problem(path))
        ]
        aside = (path.name for path in self.root.glob("corrupt_step_*") if _ASIDE.fullmatch(path.name))
        return found + sorted(aside)

    def problem(self, folder: Path) -> str | None:
        """Return a description of what is wrong with a checkpoint's contents, or None if it is complete. A sealed
        folder is read only the first time.
        """
        try:
            key = (folder, (folder / durable.MANIFEST).stat().st_mtime_ns)
        except OSError as error:
            return f"{durable.MANIFEST} cannot be read ({error.strerror})"
        if key not in self._verified:
            self._verified[key] = durable.folder_problem(folder, contents=True)
        return self._verified[key]

    def folders(self) -> list[tuple[str, int, Path]]:
        """Return (prefix, step, path) of every checkpoint folder, in the order del, tmp, old, published, and then by
        step.
        """
        if not self.root.is_dir():
            return []
        order = {"del_": 0, "tmp_": 1, "old_": 2, "": 3}
        found = ((_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir())
        listed = [(match[1], int(match[2]), path) for match, path in found if match and path.is_dir()]
        return sorted(listed, key=lambda entry: (order[entry[0]], entry[1]))


def step_of(folder: Path, prefix: str) -> int:
    """Return N of a folder named `<prefix>step_N`. Raise ValueError for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None or match[1] != prefix:
        raise ValueError(f"{folder}: a checkpoint folder named {prefix}step_N is expected here")
    return int(match[2])


def delete(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link (but not its target)."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
