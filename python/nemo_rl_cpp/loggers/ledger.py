"""What a run wrote into its log folder: nothing else is ever cut back or removed there.

`.run_files` holds a line a file, `{"step": 3, "file": "train_data_step3.jsonl"}`, written before the file itself; and, where
the run has checkpoints, a line `{"owner": "/absolute/checkpoint_dir", "run": "5f0c..."}`: the folder whose run these logs
are, and a random number that the manifests of its checkpoints repeat.
"""

import errno
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal, TypedDict, cast

from nemo_rl_cpp.files.durable import fsync_path, json_rows, own_copy, read_text, write_atomic

LEDGER = ".run_files"
_STEP_FILE = re.compile(r"(?:[^/]+/)*[^/]*_step(\d+)\.(?:jsonl|svg)", re.ASCII)


class LedgerRow(TypedDict, total=False):
    """One line: a file of a step, or whose logs these are."""

    step: int
    file: str
    owner: str
    run: str


class LogLedger:
    """The ledger of one log folder, and the files in it that are not yet synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / LEDGER
        self._rows = _rows(self._path)
        self._known = {row.get("file") for row in self._rows}
        self._unsynced: dict[Path, None] = {}

    @property
    def owner(self) -> str | None:
        """The checkpoint folder of the run that wrote here; None when nobody said."""
        return self._last("owner")

    @property
    def run(self) -> str | None:
        """The random number of the run that wrote here."""
        return self._last("run")

    def own(self, checkpoint_dir: Path) -> None:
        """Says whose logs these are."""
        if self.owner != str(checkpoint_dir):
            self._append({"owner": str(checkpoint_dir), "run": self.run or secrets.token_hex(8)})

    def _last(self, key: Literal["owner", "run"]) -> str | None:
        return next((row[key] for row in reversed(self._rows) if isinstance(row.get(key), str)), None)

    def add(self, path: Path) -> None:
        """Call before a file of a step is written; other files need no entry."""
        self._unsynced[path] = None
        name = path.relative_to(self.folder).as_posix()
        match = _STEP_FILE.fullmatch(name)
        if match and name not in self._known:
            self._append({"step": int(match[1]), "file": name})
            self._known.add(name)

    def cut(self, step: int) -> None:
        """Removes the files of later steps that stand in the ledger, and their entries."""
        later = [row for row in self._rows if _later(row, step)]
        for row in later:
            path = self.folder / row["file"]
            if not path.is_symlink() and path.is_file() and path.resolve().is_relative_to(self.folder.resolve()):
                path.unlink()
        if later:
            self._rows = [row for row in self._rows if not _later(row, step)]
            self._known = {row.get("file") for row in self._rows}
            write_atomic(self._path, "".join(json.dumps(row) + "\n" for row in self._rows))

    def sync(self) -> None:
        """Brings every file that was added since the last call to the disk, with its folder's entry."""
        files = [path for path in (*self._unsynced, self._path) if path.is_file()]
        for path in files:
            fsync_path(path)
        for folder in {path.parent for path in files}:
            fsync_path(folder)
        self._unsynced.clear()

    def _append(self, row: LedgerRow) -> None:
        self._rows.append(row)
        text = json.dumps(row) + "\n"
        own_copy(self._path)
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not an ordinary file", str(self._path))
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a kill in the middle of a line
            os.write(descriptor, (("\n" if torn else "") + text).encode())
        finally:
            os.close(descriptor)


def _later(row: LedgerRow, step: int) -> bool:
    """Whether an entry is well-formed, stays in the folder and belongs to a later step."""
    name = row.get("file")
    if not isinstance(name, str) or (match := _STEP_FILE.fullmatch(name)) is None:
        return False
    return ".." not in name.split("/") and not name.startswith("/") and int(match[1]) > step


def _rows(path: Path) -> list[LedgerRow]:
    try:
        return [cast(LedgerRow, row) for row in json_rows(read_text(path).splitlines())]
    except (OSError, ValueError):
        return []
