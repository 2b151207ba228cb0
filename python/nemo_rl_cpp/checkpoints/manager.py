"""Checkpoints of a run: written aside, sealed, renamed into place, thinned out, and found again after any crash.

    checkpoint_dir/
      step_20/
        training_info.json        state of the loop and the metric, see `algorithms/train_state.py`
        config.yaml               the resolved configuration
        policy/weights/           an ordinary Hugging Face folder: config.json, model.safetensors, tokenizer files
        policy/optimizer/         absent with checkpointing.save_optimizer=false
        value/weights/ ...        PPO
        trainer_state/            data loader and whatever else the loop keeps
        manifest.json             size and SHA-256 of every file; written last
      latest_checkpoint_status.json

A save fills `tmp_step_N`, syncs every file, writes the manifest and renames the folder to `step_N`. At any instant the
newest `step_N` with a valid manifest is whole; `recover` finishes or removes what a crash left in between.
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from nemo_rl_cpp.checkpoints.store import STATUS, TRAINING_INFO, CheckpointRecord, CheckpointStore, step_of
from nemo_rl_cpp.config.access import as_number, to_json, written
from nemo_rl_cpp.config.base import Settings
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.config.sections import check_keys, read_section
from nemo_rl_cpp.files import durable
from nemo_rl_cpp.files.folder_lock import FolderError, make_folder
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml


class ResumeError(FolderError):
    """A run must not go on from what its checkpoint folder holds, or must not begin there."""


class CheckpointManager:
    """Saves, keeps and finds checkpoints by `checkpointing.*`.

    One save, from the loop:

        with manager.saving(step, state.to_training_info(), config) as folder:
            policy.save_checkpoint(folder / "policy" / "weights", folder / "policy" / "optimizer")

    An exception in the block (no space left, Ctrl-C) removes the unfinished folder; earlier checkpoints are untouched.
    `init_tmp_checkpoint` and `finalize_checkpoint` are the same two halves for callers that cannot use a block.
    """

    def __init__(self, config: CheckpointingConfig | Mapping[str, object]) -> None:
        """`config`: the `checkpointing` section, or a mapping or an object with its keys; there a missing `metric_name` or
        `keep_top_k` is null and a missing `save_period` 1. ValueError for unknown keys and for values that cannot work."""
        check_keys(config, "checkpointing", CheckpointingConfig)
        section = read_section(
            config, CheckpointingConfig, checkpoint_dir="", metric_name=None, save_period=1, keep_top_k=None
        )
        if not section.checkpoint_dir:
            raise ValueError("checkpointing.checkpoint_dir is empty: give the folder that will hold the checkpoints")
        self.enabled = bool(section.enabled)
        self.checkpoint_dir = Path(section.checkpoint_dir).absolute()  # the user's code may change the working folder
        self.metric_name = section.metric_name
        self.higher_is_better = bool(section.higher_is_better)
        self.save_period = int(section.save_period)
        self.keep_top_k = section.keep_top_k
        self.ft_keep_latest_k = section.ft_keep_latest_k
        self.ft_save_period = section.ft_save_period
        self.save_optimizer = bool(section.save_optimizer)
        self.resume = section.resume
        self.identity: dict[str, Plain] = {}
        """which model, tokenizer and rows every checkpoint is of"""
        self.metric_seen = False
        """whether `metric_name` was found among the metrics of this run"""
        self.metric_missed = False
        """whether it was said that a checkpoint goes without it"""
        self.owed = False
        """whether a checkpoint that was due could not be saved for want of space"""
        self._check_config()
        self.facts: dict[str, Plain] = {}
        """stands in the manifest of every checkpoint, beside the step and the time"""
        self._store = CheckpointStore(self.checkpoint_dir)

    def _check_config(self) -> None:
        for key, least in (("save_period", 1), ("ft_save_period", 1), ("keep_top_k", 0), ("ft_keep_latest_k", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"checkpointing.{key}={value}: give a number of at least {least}, or null")

    def save_reason(
        self, step: int, *, is_last: bool = False, early_stop: bool = False, timeout: bool = False, interrupted: bool = False
    ) -> str | None:  # fmt: skip
        """Why a checkpoint is due after `step` (1-based), or None. Nothing is due when checkpointing is off."""
        reasons = {
            "interrupted": interrupted,
            "timeout": timeout,
            "early_stop": early_stop,
            "last_step": is_last,
            "save_period": step % self.save_period == 0,
            "ft_save_period": self.ft_save_period is not None and step % self.ft_save_period == 0,
        }
        return next((name for name, holds in reasons.items() if holds), None) if self.enabled else None

    # ---------------------------------------------------------------- saving

    @contextmanager
    def saving(
        self, step: int, training_info: Mapping[str, object], run_config: Settings | None = None
    ) -> Iterator[Path]:
        """Yields the temporary folder to fill; seals and publishes it when the block ends without an exception."""
        folder = self.init_tmp_checkpoint(step, training_info, run_config)
        try:
            yield folder
            self.finalize_checkpoint(folder)
        except BaseException as error:
            self.abandon(folder)
            if isinstance(error, OSError):
                error.add_note(
                    f"saving step {step} into {self.checkpoint_dir} failed; earlier checkpoints are untouched"
                )
            raise

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, object], run_config: Settings | None = None
    ) -> Path:
        """Makes `tmp_step_N` with training_info.json and config.yaml; returns its absolute path.

        FolderInUseError (a RuntimeError) when another process is at work in the same checkpoint_dir.
        """
        make_folder(self.checkpoint_dir, "checkpointing.checkpoint_dir")
        self._store.acquire()
        folder = self._store.temporary(step)
        try:
            self._store.recover()
            self._store.make_temporary(step)
            durable.write_durable(folder / TRAINING_INFO, json.dumps(to_json(training_info), indent=1))
            if run_config is not None:
                durable.write_durable(folder / "config.yaml", dump_yaml(written(run_config)))
        except BaseException:
            self.abandon(folder)
            raise
        return folder

    def finalize_checkpoint(self, checkpoint_path: Path | str) -> None:
        """Seals `tmp_step_N`, renames it to `step_N` (an older `step_N` makes way through `old_step_N`), updates the
        status file and removes checkpoints that the retention rules do not keep."""
        folder = Path(checkpoint_path).absolute()
        step = step_of(folder, "tmp_")
        self._store.acquire()
        try:
            durable.seal_folder(folder, step=step, saved=time.strftime("%Y-%m-%d %H:%M:%S"), **self.facts)
            target = self._store.publish(folder)
        except BaseException:
            self.abandon(folder)
            raise
        try:
            status = {"latest_step": step, "checkpoint": target.name}
            self._tidying(
                target, lambda: durable.write_atomic(self.checkpoint_dir / STATUS, json.dumps(status, indent=1))
            )
            self._tidying(target, lambda: self._thin_out(exclude_latest=True))
        finally:
            self._store.release()

    def _tidying(self, saved: Path, work: Callable[[], None]) -> None:
        """`work()` after a save: the checkpoint is safe, so an OSError is a warning and does not end the run."""
        try:
            work()
        except OSError as error:
            warnings.warn(f"{self.checkpoint_dir}: {error} while tidying up after saving {saved.name}", stacklevel=4)

    def abandon(self, checkpoint_path: Path | str) -> None:
        """Removes an unfinished temporary checkpoint, never a published one."""
        folder = Path(checkpoint_path)
        if folder.name.startswith("tmp_") and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        self._store.release()

    def claim(self) -> None:
        """Keeps every other run out of the folder until `shutdown`, or until this process ends.

        FolderInUseError (a ValueError) says who is in it: process, host and since when. FolderError where the folder
        cannot be made or written. Nothing when checkpointing is off.
        """
        if self.enabled:
            self._store.claim()

    def shutdown(self) -> None:
        """Gives the folder free; may be called again."""
        self._store.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---------------------------------------------------------------- finding

    def get_latest_checkpoint_path(self) -> str | None:
        """Folder of the newest whole checkpoint, every SHA-256 verified; None when there is none.

        Whatever a crash left behind is finished or removed first (see `recover`); a damaged checkpoint is passed over
        with a warning.
        """
        self.recover()
        for record in reversed(self._store.history()):
            problem = self._store.problem(record.path)
            if problem is None:
                return str(record.path)
            warnings.warn(f"checkpoint {record.path} is passed over: {problem}", stacklevel=2)
        return None

    def check_resume_mode(self, latest: str | Path | None) -> None:
        """ResumeError where `checkpointing.resume` does not go with `latest`, the newest whole checkpoint, and where there
        are checkpoints but none is whole."""
        if latest is not None and self.resume == "never":
            raise ResumeError(
                f"checkpointing.resume=never, but {self.checkpoint_dir} holds checkpoints (the newest is {Path(latest).name}): give the run "
                "another checkpointing.checkpoint_dir, move them away, or set checkpointing.resume=auto"
            )
        if latest is None and (unusable := self.unusable()):
            raise ResumeError(
                f"no checkpoint of {self.checkpoint_dir} is whole ({', '.join(unusable)}): repair or move them away, or give the run another "
                "checkpointing.checkpoint_dir"
            )
        if latest is None and self.resume == "must":
            raise ResumeError(
                f"checkpointing.resume=must, but {self.checkpoint_dir} holds no checkpoint: give the folder of the run to go on with, or set "
                "checkpointing.resume=auto to begin"
            )

    def unusable(self) -> list[str]:
        """Names of the checkpoint folders there that nothing can be resumed from: damaged ones, those set aside, and
        another program's."""
        return self._store.unusable()

    def load_training_info(self, checkpoint_path: Path | str | None = None) -> dict[str, Plain] | None:
        """training_info.json of a checkpoint; None for None."""
        if checkpoint_path is None:
            return None
        return json.loads(durable.read_text(Path(checkpoint_path) / TRAINING_INFO))

    @staticmethod
    def get_resume_paths(
        last_checkpoint_path: Path | str | None, *, model_component: Literal["policy", "value"] = "policy"
    ) -> tuple[Path | None, Path | None]:
        """(weights folder, optimizer folder) of a checkpoint: both None for None; the second None, with a warning,
        when the optimizer was not saved."""
        if not last_checkpoint_path:
            return None, None
        component = Path(last_checkpoint_path) / model_component
        optimizer = component / "optimizer"
        if not optimizer.exists():
            warnings.warn(
                f"{optimizer} does not exist (checkpointing.save_optimizer was false): the {model_component} optimizer starts fresh. Its "
                "moments are 0, its learning-rate schedule begins anew, and float32 master weights are made of the saved weights, so the run "
                "goes on otherwise than an unbroken one",
                stacklevel=2,
            )
            return component / "weights", None
        return component / "weights", optimizer

    # ---------------------------------------------------------------- keeping order

    def recover(self) -> list[str]:
        """Finishes or removes what a crash in mid-save left behind; returns what it did, in words.

        A sealed `tmp_step_N` is published; an unsealed one is removed. An `old_step_N` whose `step_N` is missing goes
        back in its place. A `step_N` that is not whole by manifest and sizes is set aside as `corrupt_step_N`; one without
        a manifest is another program's and stays, until a save needs its name. Does nothing while a save is going on
        there, or where the folder cannot be written.
        """
        if not self.checkpoint_dir.is_dir() or self._store.saving:
            return []
        try:
            self._store.acquire()
        except (OSError, RuntimeError):
            return []
        try:
            return self._store.recover()
        finally:
            self._store.release()

    def _thin_out(self, exclude_latest: bool) -> None:
        """Removes what no rule keeps.

        Kept are: the latest (with `exclude_latest`); the `keep_top_k` best among the steps that are multiples of
        `save_period` (all of them with null), by metric, or the newest without one; the newest `ft_keep_latest_k` of
        any step. With both limits null nothing is removed. A missing metric counts as the worst, ties go to the newer.
        """
        records = self._store.history()
        if not records or (self.keep_top_k is None and self.ft_keep_latest_k is None):
            return
        newest_first = sorted((record.step for record in records), reverse=True)
        keep = set(newest_first[:1] if exclude_latest else [])
        periodic = [record for record in records if record.step % self.save_period == 0]
        keep.update(record.step for record in self._best_first(periodic)[: self.keep_top_k])
        keep.update(newest_first[: self.ft_keep_latest_k or 0])
        for record in records:
            if record.step not in keep:
                self._store.remove(record.path)

    def _metric(self, record: CheckpointRecord) -> float | None:
        value = as_number(record.info.get(self.metric_name)) if self.metric_name else None
        return None if value is None or value != value else value

    def _best_first(self, records: list[CheckpointRecord]) -> list[CheckpointRecord]:
        def rank(record: CheckpointRecord) -> tuple[bool, float, int]:
            value = self._metric(record)
            if value is None:
                return (False, 0.0, record.step)
            return (True, value if self.higher_is_better else -value, record.step)

        return sorted(records, key=rank, reverse=True)
