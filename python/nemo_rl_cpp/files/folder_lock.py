"""A lock on a folder, with a lock file that names its holder. The system releases the lock when the process ends."""

import contextlib
import errno
import json
import os
import socket
import time
import warnings
from pathlib import Path

from nemo_rl_cpp.files.durable import json_object
from nemo_rl_cpp.files.yaml_text import Plain

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_MISTAKES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST)
_PATIENCE = 0.1  # seconds, because a check may hold the lock briefly


class FolderError(ValueError):
    """Raised if a run cannot use the given folder. The message contains the configuration key to change."""


class FolderInUseError(FolderError, RuntimeError):
    """Raised if another run holds the lock of the folder."""


class FolderLock:
    """A lock on a folder until `close` or the end of the process, not held by forked children. Raise FolderInUseError
    with process, host and time if another run holds it, and FolderError, with the configuration key `key`, if the
    folder cannot be locked. Warn if the file system has no locks."""

    def __init__(self, folder: Path, key: str) -> None:
        from filelock import FileLock, Timeout  # importing takes 20 ms, which a run without checkpoints saves

        self._path = folder / LOCK
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=_PATIENCE, poll_interval=_PATIENCE / 5)
        except Timeout:
            holder = held_by(json_object(self._path))
            raise FolderInUseError(f"{folder} {holder}: end that run, or give this one a {key} of its own") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise folder_error(folder, key, error) from error
            text = f"{folder}: this file system has no locks, so nothing would tell of a second run in it ({key})"
            warnings.warn(text, stacklevel=3)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # the lock works without this text, for example on a full disk
            self._path.write_text(json.dumps(me) + "\n")

    def close(self, remove: bool = False) -> None:
        """Release the lock. With `remove`, also delete the lock file. Further calls do nothing."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._path.unlink() if remove else os.truncate(self._path, 0)
        self._lock.release()


def holder_of(folder: Path) -> dict[str, Plain] | None:
    """Return the process that holds a folder's lock (`pid`, `host`, `since`); None if the folder is not locked."""
    from filelock import FileLock, Timeout

    path = folder / LOCK
    try:
        if not path.is_file():
            return None
        with FileLock(path, timeout=0, fallback_to_soft=False):
            return None
    except Timeout:
        return json_object(path)
    except OSError:
        return None


def held_by(holder: dict[str, Plain]) -> str:
    """Return a text on the process `holder` of a lock, such as "is in use by process 12 on host, since ..."."""
    if "pid" not in holder:
        return "is in use by another process"
    if holder["pid"] == os.getpid() and holder.get("host") == socket.gethostname():
        return f"is in use by this very process, since {holder.get('since')}: a run of it has not ended"
    return f"is in use by process {holder['pid']} on {holder.get('host')}, since {holder.get('since')}"


def make_folder(folder: Path, key: str) -> bool:
    """Create a folder and its parents, and return whether it is new. Raise FolderError, which names the configuration
    key `key`, if that fails."""
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
    """Return a FolderError with key and folder if the user can fix the error; otherwise return `error` itself."""
    if error.errno not in _MISTAKES:
        return error
    reason = "a file of that name is there" if error.errno == errno.EEXIST else (error.strerror or str(error))
    return FolderError(f"{key}={folder}: this folder cannot be written ({reason}); give one that can")
