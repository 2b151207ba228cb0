"""The log folders exp_NNN of runs, and the ledger of the files that a run wrote into its own."""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict, cast

from nemo_rl_cpp.files.durable import fsync_path, json_rows, manifest_facts, own_copy, read_text, write_atomic

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


_TRAINING_INFO = "training_info.json"


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Makes and returns `<base_log_dir>/exp_NNN` with the next free number."""
    base = Path(base_log_dir)
    base.mkdir(parents=True, exist_ok=True)
    number = _next_number(base)
    while True:
        try:
            (base / _name(number)).mkdir()
            return str(base / _name(number))
        except FileExistsError:  # another run started at the same moment
            number += 1


def get_experiment_dir(
    base_log_dir: str, training_info: Mapping[str, object] | None = None, checkpoint: str | Path | None = None
) -> str:
    """The log folder of a run below `base_log_dir`: the one that its checkpoint names (`log_dir` of training_info), if it
    is there and is this run's own; else a new one.

    Only the name counts, since a checkpoint may have been copied or moved. A folder is the run's own when its ledger has
    the number that the manifest of `checkpoint` (a folder step_N) has, and names the folder that holds it, or one that is
    gone: it was moved. In every other case the logs go on in a new folder, and a line says so.
    """
    recorded = (training_info or {}).get("log_dir")
    candidate = _recorded(base_log_dir, training_info)
    if candidate is None:
        return get_next_experiment_dir(base_log_dir)
    if _is_own(candidate, checkpoint):
        return str(candidate)
    new = get_next_experiment_dir(base_log_dir)
    owner = LogLedger(candidate).owner
    why = (
        "it is not there"
        if not candidate.is_dir()
        else f"it holds the logs of {owner}"
        if owner
        else "nothing says that it is this run's"
    )
    print(
        f"The logs go on in {new}: the checkpoint names {recorded}, and {candidate} is left alone ({why}).", flush=True
    )
    return new


def foreseen_experiment_dir(base_log_dir: str | Path, checkpoint: Path | None) -> Path:
    """What `get_experiment_dir` will return for a run that goes on from this checkpoint (None: that begins), unless another run
    takes the folder before. Nothing is made."""
    base = Path(base_log_dir)
    if checkpoint is not None:
        try:
            info = json.loads(read_text(checkpoint / _TRAINING_INFO))
        except (OSError, ValueError):
            info = {}
        candidate = _recorded(base_log_dir, info if isinstance(info, dict) else {})
        if candidate is not None and _is_own(candidate, checkpoint):
            return candidate
    return base / _name(_next_number(base))


def _name(number: int) -> str:
    return f"exp_{number:03d}"


def _next_number(base: Path) -> int:
    try:
        names = [path.name for path in base.iterdir()]
    except OSError:
        return 1
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"exp_(\d+)", name))), default=0) + 1


def _recorded(base: str | Path, training_info: Mapping[str, object] | None) -> Path | None:
    """The folder that a checkpoint names, below `base`."""
    recorded = (training_info or {}).get("log_dir")
    name = Path(str(recorded)).name if recorded else ""
    return Path(base) / name if re.fullmatch(r"exp_\d+", name, re.ASCII) else None


def _is_own(candidate: Path, checkpoint: str | Path | None) -> bool:
    ledger = LogLedger(candidate)
    owner, run = ledger.owner, manifest_facts(Path(checkpoint)).get("run") if checkpoint is not None else None
    home = str(Path(checkpoint or "").absolute().parent.resolve())  # of the name: step_N may be a link to another run's
    at_home = owner is not None and (owner == home or not Path(owner).is_dir())
    return at_home and run is not None and ledger.run == run
