"""Checkpoints of a run. A checkpoint is written to a temporary folder, sealed with a manifest, and renamed into place.
Old checkpoints are removed, and the newest complete one is found after any crash.

    checkpoint_dir/
      step_20/
        training_info.json        state of the loop and the metric, see `algorithms/train_state.py`
        config.yaml               the resolved configuration
        policy/weights/           an ordinary Hugging Face folder: config.json, model.safetensors, tokenizer files
        policy/optimizer/         absent with checkpointing.save_optimizer=false
        value/weights/ ...        PPO
        train_dataloader.json     position in the data
        trainer_state/            further state of the loop, see `algorithms/checkpointing.py`
        manifest.json             size and SHA-256 of every file; written last
      latest_checkpoint_status.json

A save fills `tmp_step_N`, syncs every file, writes the manifest and renames the folder to `step_N`. At any moment the
newest `step_N` with a valid manifest is complete. `recover` finishes or removes what a crash has left. An `old_step_N`
is being replaced by a new `step_N`, a `del_step_N` is being removed, and a `corrupt_step_N` is damaged but kept."""

import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from nemo_rl_cpp.config.access import as_number, to_json, written
from nemo_rl_cpp.config.base import Settings
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files import durable
from nemo_rl_cpp.files.folder_lock import LOCK, FolderError, FolderLock, make_folder
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml

TRAINING_INFO = "training_info.json"
_STATUS = "latest_checkpoint_status.json"
_KEY = "checkpointing.checkpoint_dir"
_FOLDER = re.compile(r"(tmp_|old_|del_|)step_(0|[1-9]\d{0,17})", re.ASCII)
_ASIDE = re.compile(r"corrupt_step_\d+(_\d+)?", re.ASCII)


class ResumeError(FolderError):
    """Raised if a run may not resume from its checkpoint folder, or may not start in it."""


class CheckpointManager:
    """The checkpoints of a run, which are saved, kept and found as the section `checkpointing` configures.

    The loop saves a checkpoint as follows:

        with manager.saving(step, state.to_training_info(), config) as folder:
            policy.save_checkpoint(folder / "policy" / "weights", folder / "policy" / "optimizer")

    An exception in the `with` block (a full disk, Ctrl-C) removes the unfinished folder; earlier checkpoints are
    untouched. All changes need the folder's lock, so that two processes cannot interfere. The lock is held for one save
    or, after `claim`, for a whole run.

    Attributes:
        metric_missed: whether the user was warned that a checkpoint lacks the metric.
        removed: names of the checkpoints that the last save removed.
        owed: whether a due checkpoint could not be saved because the disk was full.
        facts: entries to add to the manifest of every checkpoint, in addition to step and time."""

    def __init__(self, config: CheckpointingConfig) -> None:
        self.config = config
        self.enabled, self.metric_name, self.save_period = config.enabled, config.metric_name, config.save_period
        self.save_optimizer = config.save_optimizer
        self.checkpoint_dir = Path(config.checkpoint_dir).absolute()  # the user's code may change the working directory
        self.metric_missed = self.owed = False
        self.removed: list[str] = []
        self.facts: dict[str, Plain] = {}
        self._lock: FolderLock | None = None
        self._claimed = self._made = self._saving = False
        self._verified: dict[tuple[Path, int], str | None] = {}

    def save_reason(
        self, step: int, *, is_last: bool = False, early_stop: bool = False, timeout: bool = False, interrupted: bool = False
    ) -> str | None:  # fmt: skip
        """Return the name of the setting or of the argument because of which a checkpoint is due after `step` (counted
        from 1), or None."""
        reasons = {
            "interrupted": interrupted,
            "timeout": timeout,
            "early_stop": early_stop,
            "last_step": is_last,
            "save_period": step % self.save_period == 0,
            "ft_save_period": bool(self.config.ft_save_period) and step % self.config.ft_save_period == 0,
        }
        return next((name for name, holds in reasons.items() if holds), None) if self.enabled else None

    # ---------------------------------------------------------------- saving

    @contextmanager
    def saving(
        self, step: int, training_info: Mapping[str, object], run_config: Settings | None = None
    ) -> Iterator[Path]:
        """Yield the folder `tmp_step_N` with training_info.json and config.yaml, for the `with` block to fill. When the
        block ends without an exception, write the folder's manifest, rename the folder to `step_N`, replacing an older
        one, and remove old checkpoints.

        Raise FolderInUseError (a ValueError and a RuntimeError) if another process uses the same checkpoint_dir."""
        make_folder(self.checkpoint_dir, _KEY)
        folder = self.checkpoint_dir / f"tmp_step_{step}"
        with self._locked():
            try:
                _recover(self.checkpoint_dir)
                _make_way(folder)
                folder.mkdir()
                durable.write_durable(folder / TRAINING_INFO, json.dumps(to_json(training_info), indent=1))
                if run_config is not None:
                    durable.write_durable(folder / "config.yaml", dump_yaml(written(run_config)))
                yield folder
                durable.seal_folder(folder, step=step, saved=time.strftime("%Y-%m-%d %H:%M:%S"), **self.facts)
                self._tidy_up(step, _publish(folder))
            except BaseException as error:
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)
                if isinstance(error, OSError):
                    kept = "earlier checkpoints are untouched"
                    error.add_note(f"saving step {step} into {self.checkpoint_dir} failed; {kept}")
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of checkpoint_dir in the `with` block. Raise FolderInUseError if another process holds it."""
        self._lock = self._lock or FolderLock(self.checkpoint_dir, _KEY)
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            if self._lock is not None and not self._claimed:
                self._lock.close()
                self._lock = None

    def _tidy_up(self, step: int, saved: Path) -> None:
        """Write the status file, which names the new checkpoint `saved`, and remove old checkpoints. An OSError only
        causes a warning, because the new checkpoint is already safe."""
        status = json.dumps({"latest_step": step, "checkpoint": saved.name}, indent=1)
        for work in (lambda: durable.write_atomic(self.checkpoint_dir / _STATUS, status), self._thin_out):
            try:
                work()
            except OSError as error:
                text = f"{self.checkpoint_dir}: {error} while tidying up after saving {saved.name}"
                warnings.warn(text, stacklevel=4)

    def claim(self) -> None:
        """Lock the folder against other runs until `shutdown`, unless checkpoints are disabled. Raise FolderInUseError
        if another run uses it, FolderError if it cannot be created or written."""
        if not self.enabled or self._claimed:
            return
        try:
            self._made = make_folder(self.checkpoint_dir, _KEY)
            self._lock = self._lock or FolderLock(self.checkpoint_dir, _KEY)
        except OSError as error:
            why = error.strerror or error
            raise FolderError(f"{_KEY}={self.checkpoint_dir}: the run cannot have this folder ({why})") from error
        self._claimed = True

    def shutdown(self) -> None:
        """Unlock the folder. Remove it if `claim` created it and it is still empty. Further calls do nothing."""
        lock, self._lock, made, root = self._lock, None, self._made, self.checkpoint_dir
        self._claimed = self._made = self._saving = False
        if lock is None:
            return
        empty = made and root.is_dir() and [path.name for path in root.iterdir()] == [LOCK]
        lock.close(remove=empty)
        if empty:
            with suppress(OSError):  # a file was added in the meantime
                root.rmdir()

    # ---------------------------------------------------------------- finding

    def get_latest_checkpoint_path(self) -> str | None:
        """Run `recover`, then return the folder of the newest complete checkpoint whose files all have the SHA-256 in
        its manifest, or None. Skip damaged checkpoints with a warning."""
        self.recover()
        for record in reversed(history(self.checkpoint_dir)):
            problem = self._problem(record.path)
            if problem is None:
                return str(record.path)
            warnings.warn(f"checkpoint {record.path} is passed over: {problem}", stacklevel=2)
        return None

    def _problem(self, folder: Path) -> str | None:
        """Return what is wrong with the contents of a checkpoint's files, or None. The files are read at the first call
        for a checkpoint; later calls return the same result."""
        try:
            key = (folder, (folder / durable.MANIFEST).stat().st_mtime_ns)
        except OSError as error:
            return f"{durable.MANIFEST} cannot be read ({error.strerror})"
        if key not in self._verified:
            self._verified[key] = durable.folder_problem(folder, contents=True)
        return self._verified[key]

    def _unusable(self) -> list[str]:
        """Return the names of folders from which no run can resume: damaged, `corrupt_`, or another program's."""
        published = [path for prefix, _, path in _folders(self.checkpoint_dir) if prefix == ""]
        found = [path.name for path in published if _quick_problem(path) or self._problem(path)]
        aside = (path.name for path in self.checkpoint_dir.glob("corrupt_step_*") if _ASIDE.fullmatch(path.name))
        return found + sorted(aside)

    def check_resume_mode(self, latest: str | Path | None) -> None:
        """Raise ResumeError if `checkpointing.resume` forbids to resume from `latest`, the newest complete checkpoint
        (None: to start from scratch), or if there are only incomplete checkpoints."""
        if latest is not None and self.config.resume == "never":
            there = f"{self.checkpoint_dir} holds checkpoints (the newest is {Path(latest).name})"
            what_to_do = f"give the run another {_KEY}, or set checkpointing.resume=auto"
            raise ResumeError(f"checkpointing.resume=never, but {there}: {what_to_do}")
        if latest is None and (unusable := self._unusable()):
            what_to_do = f"repair or move them away, or give the run another {_KEY}"
            raise ResumeError(f"no checkpoint of {self.checkpoint_dir} is whole ({', '.join(unusable)}): {what_to_do}")
        if latest is None and self.config.resume == "must":
            what_to_do = "give the folder of the run to go on with, or set checkpointing.resume=auto to begin"
            raise ResumeError(f"checkpointing.resume=must, but {self.checkpoint_dir} holds no checkpoint: {what_to_do}")

    def load_training_info(self, checkpoint_path: Path | str) -> dict[str, Plain]:
        return json.loads((Path(checkpoint_path) / TRAINING_INFO).read_text(encoding="utf-8"))

    @staticmethod
    def get_resume_paths(
        last_checkpoint_path: Path | str | None, *, model_component: Literal["policy", "value"] = "policy"
    ) -> tuple[Path | None, Path | None]:
        """Return (weights folder, optimizer folder) of a model in a checkpoint; (None, None) if `last_checkpoint_path`
        is None. If the optimizer was not saved, its folder is None, with a warning."""
        if not last_checkpoint_path:
            return None, None
        component = Path(last_checkpoint_path) / model_component
        optimizer = component / "optimizer"
        if not optimizer.exists():
            fresh = "moments, learning-rate schedule and master weights, so the run differs from an uninterrupted one"
            text = f"{optimizer} is missing (checkpointing.save_optimizer was false): the {model_component} optimizer"
            warnings.warn(f"{text} starts fresh, with new {fresh}", stacklevel=2)
            return component / "weights", None
        return component / "weights", optimizer

    # ---------------------------------------------------------------- cleaning up

    def recover(self) -> None:
        """Finish or remove what a crash during a save has left, and warn of each action.

        A `tmp_step_N` whose files match its manifest becomes `step_N`; any other is removed. An `old_step_N` becomes
        `step_N` again if that does not exist. A `step_N` whose files or sizes differ from its manifest becomes
        `corrupt_step_N`. A `step_N` without a manifest was written by another program, and stays until a save needs its
        name. Do nothing during a save, or in a folder that is locked or read-only."""
        if not self.checkpoint_dir.is_dir() or self._saving:
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked())
            except (OSError, RuntimeError):
                return
            _recover(self.checkpoint_dir)

    def _thin_out(self) -> None:
        """Remove old checkpoints. Keep the latest, the newest `ft_keep_latest_k`, and the `keep_top_k` (null: all) with
        the best metric among those whose step is a multiple of `save_period`. Of equal metrics the newer is better; a
        checkpoint without the metric is worst. If both keys are null, remove nothing."""
        if self.config.keep_top_k is None and self.config.ft_keep_latest_k is None:
            return
        records = history(self.checkpoint_dir)
        newest_first = sorted((record.step for record in records), reverse=True)
        periodic = [record for record in records if record.step % self.save_period == 0]
        best_first = sorted(periodic, key=self._rank, reverse=True)
        keep = {*newest_first[:1], *newest_first[: self.config.ft_keep_latest_k or 0]}
        keep.update(record.step for record in best_first[: self.config.keep_top_k])
        old = [record.path for record in records if record.step not in keep]
        self.removed = [path.name for path in old]
        for path in old:
            _remove(path)

    def _rank(self, record: "CheckpointRecord") -> tuple[bool, float, int]:
        value = as_number(record.info.get(self.metric_name)) if self.metric_name else None
        if value is None or value != value:  # no metric, or NaN
            return (False, 0.0, record.step)
        return (True, value if self.config.higher_is_better else -value, record.step)


# ---------------------------------------------------------------- the folder


class CheckpointRecord(NamedTuple):
    """A complete checkpoint: its step, folder and training_info."""

    step: int
    path: Path
    info: dict[str, Plain]


def history(root: Path) -> list[CheckpointRecord]:
    """Return every complete checkpoint in `root` (all files exist, with the sizes in its manifest), in order of
    steps."""
    return [
        CheckpointRecord(step, path, json.loads((path / TRAINING_INFO).read_text(encoding="utf-8")))
        for prefix, step, path in _folders(root)
        if prefix == "" and _quick_problem(path) is None
    ]


def _folders(root: Path) -> list[tuple[str, int, Path]]:
    """Return (prefix, step, path) of each checkpoint folder in `root`, sorted by prefix (`del_`, `tmp_`, `old_`, and
    last the empty one of complete checkpoints), then by step."""
    if not root.is_dir():
        return []
    order = {"del_": 0, "tmp_": 1, "old_": 2, "": 3}
    found = ((_FOLDER.fullmatch(path.name), path) for path in root.iterdir())
    listed = [(match[1], int(match[2]), path) for match, path in found if match and path.is_dir()]
    return sorted(listed, key=lambda entry: (order[entry[0]], entry[1]))


def _quick_problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's manifest, file sizes or training_info; None if nothing is."""
    problem = durable.folder_problem(path, contents=False, verify=(TRAINING_INFO,))
    if problem is not None:
        return problem
    try:
        info = json.loads((path / TRAINING_INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{TRAINING_INFO} cannot be read ({error})"
    return None if isinstance(info, dict) else f"{TRAINING_INFO} holds no mapping"


def _recover(root: Path) -> None:
    """Finish or remove what a crash during a save has left in `root`, and warn of each action."""
    done = [text for prefix, step, path in _folders(root) if (text := _recover_one(prefix, step, path))]
    for prefix, _, path in _folders(root):
        if prefix == "" and (problem := _quick_problem(path)) is not None:
            if os.path.lexists(path / durable.MANIFEST):
                done.append(f"set {path.name} aside as {_set_aside(path).name}: {problem}")
            else:  # written by another program such as NeMo RL
                done.append(f"left {path.name} as it is: {problem}")
    for text in done:
        warnings.warn(f"{root}: {text}", stacklevel=4)


def _recover_one(prefix: str, step: int, path: Path) -> str | None:
    """Publish a complete tmp_step_N, rename old_step_N to step_N if step_N does not exist, and delete any other tmp_,
    old_ or del_ folder. Return what was done. Called for tmp_step_N first, so that a newer step_N takes precedence."""
    target = path.with_name(f"step_{step}")
    if prefix == "tmp_" and not path.is_symlink() and durable.folder_problem(path, contents=True) is None:
        _publish(path)
        return f"published the finished {path.name}"
    if prefix == "old_" and not target.exists():
        durable.rename(path, target)
        return f"put {path.name} back as {target.name}"
    if prefix:
        with suppress(OSError):
            _delete(path)
        return f"removed the left-over {path.name}"
    return None


def _publish(folder: Path) -> Path:
    """Rename a complete `tmp_step_N` to `step_N`, and return the new path. If this fails, an older `step_N` is kept."""
    target = folder.with_name(folder.name.removeprefix("tmp_"))
    old = folder.with_name(f"old_{target.name}")
    if os.path.lexists(target) and not (target / durable.MANIFEST).is_file():
        _set_aside(target)  # written by another program
    if target.exists():
        _make_way(old)
    durable.publish_folder(folder, target, old)
    if old.exists():
        _delete(old)
    return target


def _remove(folder: Path) -> None:
    """Remove a checkpoint. Rename its folder first, so that a crash cannot leave a partial `step_N`."""
    doomed = folder.with_name(f"del_{folder.name}")
    _make_way(doomed)
    durable.rename(folder, doomed)
    _delete(doomed)


def _make_way(path: Path) -> None:
    """Make `path` free for a new folder: delete a folder; rename a file or link with the prefix `corrupt_`."""
    if path.is_dir() and not path.is_symlink():
        _delete(path)
    elif os.path.lexists(path):
        warnings.warn(f"{path.parent}: set {path.name} aside as {_set_aside(path).name}", stacklevel=4)


def _set_aside(path: Path) -> Path:
    """Rename step_N to `corrupt_step_N`, or `corrupt_step_N_2`, `_3`, ..., and return the new path."""
    aside, number = path.with_name(f"corrupt_{path.name}"), 2
    while os.path.lexists(aside):
        aside, number = path.with_name(f"corrupt_{path.name}_{number}"), number + 1
    durable.rename(path, aside)
    return aside


def _delete(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link (but not its target)."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
