"""Checks of the folders that a run writes to: can they be written, is there room for a save, does another run use them, and
do their checkpoints belong to this run?"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.checkpoints.store import CheckpointStore
from nemo_rl_cpp.config.master import PPOMasterConfig, WholeConfig
from nemo_rl_cpp.files.folder_lock import LOCK, held_by, holder_of
from nemo_rl_cpp.models.hub_upload import LOG_IN, can_push
from nemo_rl_cpp.models.memory import checkpoint_bytes, size_text

from .finding import Finding
from .resumed import WHAT_TO_DO, read_saved, refusals, short

_DIR, _LOGS = "checkpointing.checkpoint_dir", "logger.log_dir"


def check(config: WholeConfig) -> Iterator[Finding]:
    """Findings about the folders that a run writes to, and about that of the critic's weights with which a fresh PPO run begins."""
    yield from _warm_start(config)
    if hasattr(config, "logger"):
        yield from _asked(_LOGS, config.logger.log_dir, lambda folder: _writable(folder, _LOGS))
    if not hasattr(config, "checkpointing") or not config.checkpointing.enabled:
        return
    if config.checkpointing.push_to_hub is not None and not can_push():
        yield Finding(
            "error",
            "checkpointing.push_to_hub",
            f"is {config.checkpointing.push_to_hub}, but this machine has no token of the hub: {LOG_IN}",
        )
    given = config.checkpointing.checkpoint_dir
    problems = _asked(_DIR, given, lambda folder: (*_writable(folder, _DIR), *_lock(folder)))
    yield from problems or _asked(_DIR, given, lambda folder: (*_space(config, folder), *_resume(config, folder)))


def _asked(key: str, folder: str, question: Callable[[Path], Iterable[Finding]]) -> list[Finding]:
    """The findings of `question`; a folder that cannot even be asked about (a name too long, no right to list it) is one."""
    try:
        return list(question(Path(folder)))
    except OSError as error:
        return [
            Finding("error", key, f"is {folder}, which cannot be used ({error.strerror or error}): give another folder")
        ]


def _writable(folder: Path, key: str) -> Iterator[Finding]:
    """Writes a file without a name where the folder is, or would be made: nothing stays behind."""
    place = folder.absolute()
    while not place.exists() and not place.is_symlink() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        what = "a link to what is not there" if place.is_symlink() and not place.exists() else "not a folder"
        yield Finding("error", key, f"is {folder}, but {place} is {what}: give a folder that can be written")
        return
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        yield Finding(
            "error",
            key,
            f"is {folder}, which cannot be written ({place}: {error.strerror}): give a folder that can be written",
        )


def _lock(folder: Path) -> Iterator[Finding]:
    holder = holder_of(folder)
    if holder is not None:
        yield Finding(
            "error", _DIR, f"is {folder}, which {held_by(holder)}: end that run, or give this one a folder of its own"
        )
    elif (folder / LOCK).is_symlink() or ((folder / LOCK).exists() and not (folder / LOCK).is_file()):
        yield Finding(
            "error", _DIR, f"is {folder}, whose {LOCK} is not a file: a run keeps its lock there, so remove it"
        )


def _space(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    size = checkpoint_bytes(config)
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if size is None:
        return
    free, kept = shutil.disk_usage(place).free, config.checkpointing.keep_top_k
    there = len(CheckpointStore(folder).history())
    wanted = 1 if kept is None else max(1, kept + 2 - there)  # the best, the newest, and the one that is being written
    if free < wanted * size:
        more = f", and up to {wanted} of them are held at once (checkpointing.keep_top_k={kept})" if wanted > 1 else ""
        yield Finding(
            "warning",
            _DIR,
            f"is {folder} with {size_text(free)} free, but a checkpoint takes about {size_text(size)}{more}: free space, keep fewer, or "
            "leave the optimizer out (checkpointing.save_optimizer=false); a save that finds no space is tried again later",
        )


def _resume(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    store = CheckpointStore(folder)
    newest = next((record.path for record in reversed(store.history())), None)
    try:
        CheckpointManager(config.checkpointing).check_resume_mode(newest)
    except ResumeError as error:
        yield Finding("error", "", str(error))
        return
    if newest is None:
        return
    saved = read_saved(newest)
    for key, why in dict.fromkeys(refusals(saved, config)):
        why = why.removeprefix(f"{key.rpartition('.')[2]} ")  # which the finding's key says
        yield Finding("error", key, f"{why}, so this is another run than that of {short(saved.path)}: {WHAT_TO_DO}")


def _warm_start(config: WholeConfig) -> Iterator[Finding]:
    """An error where `ppo.warm_start_value_checkpoint` names no critic; no error for a run that resumes from its own checkpoint."""
    checkpoint = config.ppo.warm_start_value_checkpoint if isinstance(config, PPOMasterConfig) else None
    if checkpoint is None or (Path(checkpoint).expanduser() / "value" / "weights").is_dir():
        return
    if config.checkpointing.enabled and any(Path(config.checkpointing.checkpoint_dir).expanduser().glob("step_*")):
        return
    yield Finding(
        "error",
        "ppo.warm_start_value_checkpoint",
        f"is {checkpoint}, which has no folder value/weights: name a folder step_N that a PPO run with a critic has saved, or write null",
    )
