"""Checks the folders to which a run writes: write access, free space, other runs, and incompatible checkpoints."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError, history
from nemo_rl_cpp.config.master import PPOMasterConfig, TrainMasterConfig, WholeConfig
from nemo_rl_cpp.errors import Finding
from nemo_rl_cpp.files.folder_lock import held_by, holder_of
from nemo_rl_cpp.models.hub_upload import LOG_IN, can_push
from nemo_rl_cpp.models.memory import checkpoint_bytes, size_text

from .resumed import WHAT_TO_DO, read_saved, refusals, short

_DIR, _LOGS = "checkpointing.checkpoint_dir", "logger.log_dir"


def check(config: WholeConfig) -> Iterator[Finding]:
    """Yield problems with the folders to which a run writes, and with the checkpoint of PPO's initial critic."""
    if not isinstance(config, TrainMasterConfig):
        return
    yield from _warm_start(config)
    yield from _asked(_LOGS, config.logger.log_dir, lambda folder: _writable(folder, _LOGS))
    settings = config.checkpointing
    if not settings.enabled:
        return
    if settings.push_to_hub is not None and not can_push():
        text = f"is {settings.push_to_hub}, but this machine has no token of the hub: {LOG_IN}"
        yield Finding("error", "checkpointing.push_to_hub", text)
    problems = _asked(_DIR, settings.checkpoint_dir, lambda folder: (*_writable(folder, _DIR), *_lock(folder)))
    yield from problems or _asked(
        _DIR, settings.checkpoint_dir, lambda folder: (*_space(config, folder), *_resume(config, folder))
    )


def _asked(key: str, folder: str, question: Callable[[Path], Iterable[Finding]]) -> list[Finding]:
    """Return the problems that `question` finds, or one problem if it raises OSError (name too long, no permission)."""
    try:
        return list(question(Path(folder)))
    except OSError as error:
        text = f"is {folder}, which cannot be used ({error.strerror or error}): give another folder"
        return [Finding("error", key, text)]


def _writable(folder: Path, key: str) -> Iterator[Finding]:
    """Yield a problem if no file can be created in the folder or its closest existing parent. No file remains."""
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
        text = f"is {folder}, which cannot be written ({place}: {error.strerror}): give a folder that can be written"
        yield Finding("error", key, text)


def _lock(folder: Path) -> Iterator[Finding]:
    holder = holder_of(folder)
    if holder is not None:
        text = f"is {folder}, which {held_by(holder)}: end that run, or give this one a folder of its own"
        yield Finding("error", _DIR, text)


def _space(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    size = checkpoint_bytes(config)
    if size is None:
        return
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free, kept = shutil.disk_usage(place).free, config.checkpointing.keep_top_k
    there = len(history(folder))
    wanted = 1 if kept is None else max(1, kept + 2 - there)  # the best, the newest, and the one being written
    if free < wanted * size:
        more = f", and up to {wanted} of them are held at once (checkpointing.keep_top_k={kept})" if wanted > 1 else ""
        yield Finding(
            "warning", _DIR,
            f"is {folder} with {size_text(free)} free, but a checkpoint takes about {size_text(size)}{more}: free space, keep fewer, or "
            "leave the optimizer out (checkpointing.save_optimizer=false); a save that finds no space is tried again later",
        )  # fmt: skip


def _resume(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    newest = next((record.path for record in reversed(history(folder))), None)
    try:
        CheckpointManager(config.checkpointing).check_resume_mode(newest)
    except ResumeError as error:
        yield Finding("error", "", str(error))
        return
    if newest is None:
        return
    saved = read_saved(newest)
    for key, why in dict.fromkeys(refusals(saved, config)):
        why = why.removeprefix(f"{key.rpartition('.')[2]} ")  # the message begins with the key anyway
        yield Finding("error", key, f"{why}, so this is another run than that of {short(saved.path)}: {WHAT_TO_DO}")


def _warm_start(config: WholeConfig) -> Iterator[Finding]:
    """Yield an error if `ppo.warm_start_value_checkpoint` contains no critic, unless the run resumes."""
    checkpoint = config.ppo.warm_start_value_checkpoint if isinstance(config, PPOMasterConfig) else None
    if checkpoint is None or (Path(checkpoint).expanduser() / "value" / "weights").is_dir():
        return
    if config.checkpointing.enabled and any(Path(config.checkpointing.checkpoint_dir).expanduser().glob("step_*")):
        return
    text = f"is {checkpoint}, which has no folder value/weights: name a folder step_N that a PPO run with a critic has saved, or write null"
    yield Finding("error", "ppo.warm_start_value_checkpoint", text)
