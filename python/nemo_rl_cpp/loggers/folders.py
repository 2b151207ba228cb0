"""The log folders exp_NNN, the record of which run owns one, and metrics.jsonl, system.jsonl and hyperparams.json."""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_cpp.config.access import to_json
from nemo_rl_cpp.files.durable import fsync_path, json_object, json_rows, manifest_facts, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import LoggerInterface, Metrics, flatten_dict, prefixed

LEDGER = ".run_files"
_STEP_FILE = re.compile(r"(?:train|val)_data_step(\d+)\.jsonl", re.ASCII)


class LogLedger:
    """A record of which run owns a log folder, and of the files in it that are not yet synced to disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / LEDGER
        self.unsynced: set[Path] = set()  # files to which `sync` applies: those written since its last call
        self.owner: str | None = None  # the checkpoint folder of the run that wrote the logs
        self.run: str | None = None  # a random number that identifies the run, also in its checkpoints' manifests
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

    def cut(self, step: int) -> None:
        """Delete the rollout files of the steps after `step`."""
        for path in self.folder.iterdir():
            if (match := _STEP_FILE.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()

    def sync(self) -> None:
        """Sync the files in `unsynced`, and their folders, to disk."""
        files = [path for path in (*self.unsynced, self._path) if path.is_file()]
        for path in (*files, *{path.parent for path in files}):
            fsync_path(path)
        self.unsynced.clear()


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Create the folder `<base_log_dir>/exp_NNN` with the next unused number, and return its path."""
    base = Path(base_log_dir)
    base.mkdir(parents=True, exist_ok=True)
    number = _next_number(base)
    while True:
        folder = base / f"exp_{number:03d}"
        try:
            folder.mkdir()
            return str(folder)
        except FileExistsError:  # another run created it at the same moment
            number += 1


def get_experiment_dir(base_log_dir: str, recorded: object = None, checkpoint: Path | None = None) -> str:
    """Return the log folder for a run in `base_log_dir`: the folder `recorded` in the run's checkpoint (`log_dir` in
    training_info.json) if that exists and belongs to the run, otherwise a new one. Print a line if a new folder
    replaces a recorded one.

    Only the folder's name is taken from the checkpoint, which may have been copied or moved. The folder belongs to the
    run if its `LogLedger` has the run number that is in the manifest of `checkpoint`, and the checkpoint folder in the
    ledger contains `checkpoint` or no longer exists."""
    candidate = _recorded(base_log_dir, recorded)
    if candidate is not None and _is_own(candidate, checkpoint):
        return str(candidate)
    fate = "is not there"
    if candidate is not None and candidate.is_dir():
        owner = LogLedger(candidate).owner
        why = f"it holds the logs of {owner}" if owner else "nothing says that it is this run's"
        fate = f"is left alone ({why})"
    new = get_next_experiment_dir(base_log_dir)  # may have the name of `candidate`
    if candidate is not None:
        print(f"The logs go on in {new}: the checkpoint names {recorded}, and {candidate} {fate}.", flush=True)
    return new


def foreseen_experiment_dir(base_log_dir: str | Path, checkpoint: Path | None) -> Path:
    """Return the folder that `get_experiment_dir` will return for `checkpoint` (None: a new run). Create nothing."""
    info = {} if checkpoint is None else json_object(checkpoint / "training_info.json")
    candidate = _recorded(base_log_dir, info.get("log_dir"))
    own = candidate is not None and _is_own(candidate, checkpoint)
    base = Path(base_log_dir)
    return candidate if own else base / f"exp_{_next_number(base):03d}"


def _next_number(base: Path) -> int:
    try:
        names = [path.name for path in base.iterdir()]
    except OSError:
        return 1
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"exp_(\d+)", name))), default=0) + 1


def _recorded(base: str | Path, recorded: object) -> Path | None:
    name = Path(str(recorded)).name if recorded else ""
    return Path(base) / name if re.fullmatch(r"exp_\d+", name, re.ASCII) else None


def _is_own(candidate: Path, checkpoint: Path | None) -> bool:
    ledger = LogLedger(candidate)
    if checkpoint is None or ledger.owner is None or manifest_facts(checkpoint).get("run") != ledger.run:
        return False
    home = checkpoint.absolute().parent.resolve()  # step_N may be a link into another run's folder
    return ledger.owner == str(home) or not Path(ledger.owner).is_dir()


METRICS = "metrics.jsonl"
SYSTEM = "system.jsonl"
HYPERPARAMS = "hyperparams.json"


class JsonlLogger(LoggerInterface):
    """A backend that writes one sorted line per call, `{"step": 3, "train/loss": 0.1, ...}`, to metrics.jsonl, or to
    system.jsonl if the metrics have an x axis of their own (`step_metric`). Each line is one write, so a kill leaves at
    most an incomplete last line, which readers skip. If the disk is full, lines wait in memory until a later write
    succeeds."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._files: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        row = {"step": int(step)} | {name: to_json(flat[name]) for name in sorted(flat)}
        own_axis = step_metric is not None and step_metric in metrics
        self._append(SYSTEM if own_axis else METRICS, json.dumps(row, allow_nan=False))

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        write_atomic(self.log_dir / HYPERPARAMS, json.dumps(to_json(params), indent=1), durable=False)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Do nothing, because the rollout files of each step contain every value."""

    def flush(self) -> None:
        for name, descriptor in self._files.items():
            self._write(name, descriptor)
            os.fsync(descriptor)

    def finish(self) -> None:
        files, self._files = self._files, {}
        try:
            for name, descriptor in files.items():
                self._write(name, descriptor)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps, and incomplete lines, atomically. The other lines keep their exact bytes."""
        self.finish()
        path = self.log_dir / METRICS
        if not path.is_file():
            return

        def kept(line: bytes) -> bool:
            try:
                return line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                return False

        temporary = path.with_name(f".{path.name}.tmp")
        with open(path, "rb") as source, open(temporary, "wb") as target:
            target.writelines(line for line in source if kept(line))
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            path = self.log_dir / name
            content = path.read_bytes() if path.is_file() else b""
            if content and not content.endswith(b"\n"):  # an incomplete last line, which an interrupted write may leave
                os.truncate(path, content.rfind(b"\n") + 1)
            self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._waiting[name] = self._waiting.get(name, b"") + (line + "\n").encode()
        self._write(name, self._files[name])

    def _write(self, name: str, descriptor: int) -> None:
        while waiting := self._waiting.get(name):
            self._waiting[name] = waiting[os.write(descriptor, waiting) :]
