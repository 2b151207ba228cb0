"""A lock on a folder that the system releases when its process ends, however it ends, and that says who holds it."""

import errno
import fcntl
import json
import os
import socket
import stat
import time
import warnings
import weakref
from pathlib import Path

from nemo_rl_cpp.files.yaml_text import Plain

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_MISTAKES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
    errno.EEXIST,
)
_TRIES, _PAUSE = 5, 0.02  # a reader may hold the lock for a moment


class FolderError(ValueError):
    """A folder that a run was given cannot be used; the message names the key to change."""


class FolderInUseError(FolderError, RuntimeError):
    """Another run holds the folder."""


class FolderLock:
    """Held from construction to `close`, or to the end of the process; children do not inherit it.

    FolderInUseError when somebody else holds it, with process, host and time; FolderError when the folder cannot hold a
    lock. `key` names the setting to change. On a file system without locks a warning says that nothing is locked.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path, self._descriptor = folder / LOCK, -1
        holder: dict[str, Plain] = {}
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE)
            self._open(key)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    holder = _read(self._descriptor)
                    self._drop()
                    continue
                warnings.warn(
                    f"{folder}: this file system has no locks, so nothing would tell of a second run in it ({key})",
                    stacklevel=3,
                )
            if self.is_the_file_on_disk():
                break
            self._drop()  # the last holder removed the file
        else:
            raise FolderInUseError(f"{folder} {held_by(holder)}: end that run, or give this one a {key} of its own")
        self._write_holder()
        _held.add(self)

    def _open(self, key: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise FolderError(
                    f"{self._path} is not a file: a run keeps its lock there, so remove it, or change {key}"
                ) from error
            raise folder_error(self._path.parent, key, error) from error
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self._drop()
            raise FolderError(f"{self._path} is not a file: a run keeps its lock there, so remove it, or change {key}")

    def is_the_file_on_disk(self) -> bool:
        """Whether the lock file that others find is the one that is held: it may have been removed or moved away."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            return False

    def _write_holder(self) -> None:
        text = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        )
        try:  # the lock holds without it, on a full disk too
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, (text + "\n").encode(), 0)
        except OSError:
            pass

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self, remove: bool = False) -> None:
        """Gives the lock back; may be called again. `remove`: takes the file away too."""
        if self._descriptor >= 0:
            try:
                self._path.unlink() if remove else os.ftruncate(self._descriptor, 0)
            except OSError:
                pass
        self._drop()

    def __del__(self) -> None:
        self._drop()


def holder_of(folder: Path) -> dict[str, Plain] | None:
    """Who holds the lock of a folder, as far as the lock file says (`pid`, `host`, `since`); None when nobody does.

    Makes no file, and answers None where that cannot be told.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, Plain]:
    """What the holder wrote into the lock file; nothing where it cannot be read."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def held_by(holder: dict[str, Plain]) -> str:
    """ "is in use by process 12 on host, since ..." """
    if "pid" not in holder:
        return "is in use by another process"
    if holder["pid"] == os.getpid() and holder.get("host") == socket.gethostname():
        return f"is in use by this very process, since {holder.get('since')}: a run of it has not ended"
    return f"is in use by process {holder['pid']} on {holder.get('host')}, since {holder.get('since')}"


def make_folder(folder: Path, key: str) -> bool:
    """Makes a folder and its parents; True when it was not there. FolderError in words of `key` when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=False)
        return True
    except FileExistsError as error:
        if folder.is_dir():
            return False
        raise folder_error(folder, key, error) from error
    except OSError as error:
        raise folder_error(folder, key, error) from error


def folder_error(folder: Path, key: str, error: OSError) -> OSError | FolderError:
    """The error as a sentence that names key and folder, for what a user can put right; else the error itself."""
    if error.errno not in _MISTAKES:
        return error
    reason = "a file of that name is there" if error.errno == errno.EEXIST else (error.strerror or str(error))
    return FolderError(f"{key}={folder}: this folder cannot be written ({reason}); give one that can")


_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child must not keep its parent's folders locked after the parent's end."""
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_leave_to_the_parent)
