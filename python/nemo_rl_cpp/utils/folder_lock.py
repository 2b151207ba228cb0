"""A lock on a folder that the system releases when its process ends, however it ends."""

import errno
import fcntl
import os
from pathlib import Path


class FolderLock:
    """Held from construction to `close`. RuntimeError when another process holds it; `key` names the setting to change.

    File systems without locks are taken as unshared.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return
            os.close(self._descriptor)
            raise RuntimeError(f"another process is writing into {folder}: give each run a {key} of its own") from error

    def close(self) -> None:
        os.close(self._descriptor)
