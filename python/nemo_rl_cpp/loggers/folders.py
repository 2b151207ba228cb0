"""The log folder exp_NNN of a run: its checkpoint's, or the next new one."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_cpp.files.durable import manifest_facts, read_text
from nemo_rl_cpp.loggers.ledger import LogLedger

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
