"""The log folders exp_NNN of runs, and the record of which run owns a folder."""

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_cpp.files.durable import fsync_path, json_rows, manifest_facts

LEDGER = ".run_files"
_STEP_FILE = re.compile(r"(?:train|val)_data_step(\d+)\.jsonl", re.ASCII)


class LogLedger:
    """A record of which run owns a log folder, and of the files in it that are not yet synced to disk.

    Attributes:
        owner: the checkpoint folder of the run that wrote the logs; None if no run is recorded.
        run: a random number that identifies the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / LEDGER
        self._unsynced: dict[Path, None] = {}
        self.owner: str | None = None
        self.run: str | None = None
        try:
            rows = list(json_rows(self._path.read_text(encoding="utf-8").splitlines()))
        except (OSError, ValueError):
            rows = []
        for row in rows:
            if isinstance(row.get("owner"), str) and isinstance(row.get("run"), str):
                self.owner, self.run = row["owner"], row["run"]

    def own(self, checkpoint_dir: Path) -> None:
        """Record that the logs belong to the run that saves into `checkpoint_dir`."""
        if self.owner != str(checkpoint_dir):
            self.owner, self.run = str(checkpoint_dir), self.run or secrets.token_hex(8)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"owner": self.owner, "run": self.run}) + "\n")

    def add(self, path: Path) -> None:
        """Record a file that is about to be written, so that `sync` includes it."""
        self._unsynced[path] = None

    def cut(self, step: int) -> None:
        """Remove the rollout files of steps after `step`."""
        for path in self.folder.iterdir():
            if (match := _STEP_FILE.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()

    def sync(self) -> None:
        """Sync every file added since the last call, and their folders, to disk."""
        files = [path for path in (*self._unsynced, self._path) if path.is_file()]
        for path in (*files, *{path.parent for path in files}):
            fsync_path(path)
        self._unsynced.clear()


_TRAINING_INFO = "training_info.json"


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Create the folder `<base_log_dir>/exp_NNN` with the next unused number, and return its path."""
    base = Path(base_log_dir)
    base.mkdir(parents=True, exist_ok=True)
    number = _next_number(base)
    while True:
        try:
            (base / _name(number)).mkdir()
            return str(base / _name(number))
        except FileExistsError:  # another run created it at the same moment
            number += 1


def get_experiment_dir(
    base_log_dir: str, training_info: Mapping[str, object] | None = None, checkpoint: str | Path | None = None
) -> str:
    """Return the log folder for a run in `base_log_dir`: the folder recorded in the run's checkpoint (`log_dir` in
    training_info) if it exists and belongs to the run, otherwise a new folder.

    Only the name of the folder is taken from the checkpoint, because a checkpoint may have been copied or moved. The
    folder belongs to the run if two conditions hold. Its ledger file has the same run number as the manifest of
    `checkpoint` (a folder step_N). And the checkpoint folder recorded in the ledger contains `checkpoint`, or no longer
    exists. Print a line if a new folder replaces the recorded one.
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
    """Return the path that `get_experiment_dir` will return for a run that resumes from `checkpoint` (None: a new run),
    without creating a folder.
    """
    base = Path(base_log_dir)
    if checkpoint is not None:
        try:
            info = json.loads((checkpoint / _TRAINING_INFO).read_text(encoding="utf-8"))
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
    recorded = (training_info or {}).get("log_dir")
    name = Path(str(recorded)).name if recorded else ""
    return Path(base) / name if re.fullmatch(r"exp_\d+", name, re.ASCII) else None


def _is_own(candidate: Path, checkpoint: str | Path | None) -> bool:
    ledger = LogLedger(candidate)
    owner, run = ledger.owner, manifest_facts(Path(checkpoint)).get("run") if checkpoint is not None else None
    home = str(Path(checkpoint or "").absolute().parent.resolve())  # step_N may be a link into another run's folder
    at_home = owner is not None and (owner == home or not Path(owner).is_dir())
    return at_home and run is not None and ledger.run == run
