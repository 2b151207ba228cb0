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
newest `step_N` with a valid manifest is complete. `recover` finishes or removes what a crash has left.
"""

import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from nemo_rl_cpp.checkpoints.store import STATUS, TRAINING_INFO, CheckpointRecord, CheckpointStore
from nemo_rl_cpp.config.access import as_number, to_json, written
from nemo_rl_cpp.config.base import Settings, as_model
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files import durable
from nemo_rl_cpp.files.folder_lock import FolderError, make_folder
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml


class ResumeError(FolderError):
    """Raised if a run may not resume from its checkpoint folder, or may not start in it."""


class CheckpointManager:
    """The checkpoints of a run, which are saved, kept and found as the section `checkpointing` configures.

    The loop saves a checkpoint as follows:

        with manager.saving(step, state.to_training_info(), config) as folder:
            policy.save_checkpoint(folder / "policy" / "weights", folder / "policy" / "optimizer")

    An exception in the `with` block (a full disk, Ctrl-C) removes the unfinished folder; earlier checkpoints are
    untouched.

    Attributes:
        metric_seen: whether `metric_name` was found among the metrics of this run.
        metric_missed: whether the user was warned that a checkpoint lacks the metric.
        owed: whether a due checkpoint could not be saved because the disk was full.
        facts: entries to add to the manifest of every checkpoint, besides the step and the time.
    """

    def __init__(self, config: CheckpointingConfig | Mapping[str, object]) -> None:
        """Read the section `checkpointing`, or a mapping with its keys, in which `metric_name` and `keep_top_k` default
        to null and `save_period` to 1. Raise ValueError if `checkpoint_dir` is empty.
        """
        if isinstance(config, Mapping):
            config = {"checkpoint_dir": "", "metric_name": None, "save_period": 1, "keep_top_k": None} | config
        config = as_model(config, CheckpointingConfig, "checkpointing")
        if not config.checkpoint_dir:
            raise ValueError("checkpointing.checkpoint_dir is empty: give the folder that will hold the checkpoints")
        self.config = config
        self.enabled, self.metric_name, self.save_period = config.enabled, config.metric_name, config.save_period
        self.save_optimizer = config.save_optimizer
        self.checkpoint_dir = Path(config.checkpoint_dir).absolute()  # the user's code may change the working directory
        self.metric_seen = self.metric_missed = self.owed = False
        self.facts: dict[str, Plain] = {}
        self._store = CheckpointStore(self.checkpoint_dir)

    def save_reason(
        self,
        step: int,
        *,
        is_last: bool = False,
        early_stop: bool = False,
        timeout: bool = False,
        interrupted: bool = False,
    ) -> str | None:
        """Return the reason why a checkpoint is due after `step` (counted from 1), or None if none is due or if
        checkpoints are disabled.
        """
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
        block ends without an exception, seal and publish the folder, replacing an older `step_N`, and remove the
        checkpoints that no rule keeps.

        Raise FolderInUseError (a RuntimeError) if another process uses the same checkpoint_dir.
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
            yield folder
            self._store.acquire()
            durable.seal_folder(folder, step=step, saved=time.strftime("%Y-%m-%d %H:%M:%S"), **self.facts)
            self._tidy_up(step, self._store.publish(folder))
        except BaseException as error:
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                error.add_note(
                    f"saving step {step} into {self.checkpoint_dir} failed; earlier checkpoints are untouched"
                )
            raise
        finally:
            self._store.release()

    def _tidy_up(self, step: int, saved: Path) -> None:
        """Write the status file and remove old checkpoints. If that raises OSError, only warn, because the new
        checkpoint is safe.
        """
        status = json.dumps({"latest_step": step, "checkpoint": saved.name}, indent=1)
        for work in (lambda: durable.write_atomic(self.checkpoint_dir / STATUS, status), self._thin_out):
            try:
                work()
            except OSError as error:
                text = f"{self.checkpoint_dir}: {error} while tidying up after saving {saved.name}"
                warnings.warn(text, stacklevel=4)

    def claim(self) -> None:
        """Lock the folder against other runs until `shutdown`, or until this process ends.

        Raise FolderInUseError (a ValueError) if another run uses the folder; the message gives its process, host and
        time. Raise FolderError if the folder cannot be created or written. Do nothing if checkpoints are disabled.
        """
        if self.enabled:
            self._store.claim()

    def shutdown(self) -> None:
        """Unlock the folder. Further calls do nothing."""
        self._store.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---------------------------------------------------------------- finding

    def get_latest_checkpoint_path(self) -> str | None:
        """Return the folder of the newest complete checkpoint, after every SHA-256 was verified, or None if there is
        none.

        Call `recover` first. Skip damaged checkpoints with a warning.
        """
        self.recover()
        for record in reversed(self._store.history()):
            problem = self._store.problem(record.path)
            if problem is None:
                return str(record.path)
            warnings.warn(f"checkpoint {record.path} is passed over: {problem}", stacklevel=2)
        return None

    def check_resume_mode(self, latest: str | Path | None) -> None:
        """Raise ResumeError if `checkpointing.resume` does not allow `latest`, the newest complete checkpoint (None:
        there is none), or if there are checkpoints and none of them is complete.
        """
        if latest is not None and self.config.resume == "never":
            raise ResumeError(
                f"checkpointing.resume=never, but {self.checkpoint_dir} holds checkpoints (the newest is {Path(latest).name}): give the run "
                "another checkpointing.checkpoint_dir, move them away, or set checkpointing.resume=auto"
            )
        if latest is None and (unusable := self._store.unusable()):
            raise ResumeError(
                f"no checkpoint of {self.checkpoint_dir} is whole ({', '.join(unusable)}): repair or move them away, or give the run another "
                "checkpointing.checkpoint_dir"
            )
        if latest is None and self.config.resume == "must":
            raise ResumeError(
                f"checkpointing.resume=must, but {self.checkpoint_dir} holds no checkpoint: give the folder of the run to go on with, or set "
                "checkpointing.resume=auto to begin"
            )

    def load_training_info(self, checkpoint_path: Path | str) -> dict[str, Plain]:
        """Return the content of a checkpoint's training_info.json."""
        return json.loads((Path(checkpoint_path) / TRAINING_INFO).read_text(encoding="utf-8"))

    @staticmethod
    def get_resume_paths(
        last_checkpoint_path: Path | str | None, *, model_component: Literal["policy", "value"] = "policy"
    ) -> tuple[Path | None, Path | None]:
        """Return (weights folder, optimizer folder) of the model `model_component` in a checkpoint. Both are None
        without a checkpoint. If the optimizer was not saved, return None for its folder and warn.
        """
        if not last_checkpoint_path:
            return None, None
        component = Path(last_checkpoint_path) / model_component
        optimizer = component / "optimizer"
        if not optimizer.exists():
            warnings.warn(
                f"{optimizer} does not exist (checkpointing.save_optimizer was false): the {model_component} optimizer starts fresh. Its "
                "moments are 0, its learning-rate schedule starts from scratch, and float32 master weights are made of the saved weights, so the run "
                "goes on otherwise than an unbroken one",
                stacklevel=2,
            )
            return component / "weights", None
        return component / "weights", optimizer

    # ---------------------------------------------------------------- cleaning up

    def recover(self) -> list[str]:
        """Finish or remove what a crash during a save has left, and return a description of each action.

        A sealed `tmp_step_N` is published, and an unsealed one is removed. An `old_step_N` without a `step_N` is
        renamed back to `step_N`. A `step_N` whose files or sizes differ from its manifest is renamed to
        `corrupt_step_N`. A `step_N` without a manifest was written by another program and stays until a save needs its
        name. Do nothing during a save, or if the folder is locked or cannot be written.
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

    def _thin_out(self) -> None:
        """Remove the checkpoints that no rule keeps.

        The rules keep the latest checkpoint; among the steps that are multiples of `save_period`, the `keep_top_k` best
        by metric, or without a metric the newest (null: all); and the newest `ft_keep_latest_k` of any step. If both
        limits are null, nothing is removed. A checkpoint without the metric ranks last; in a tie the newer checkpoint
        ranks first.
        """
        records = self._store.history()
        if self.config.keep_top_k is None and self.config.ft_keep_latest_k is None:
            return
        newest_first = sorted((record.step for record in records), reverse=True)
        keep = set(newest_first[:1])
        periodic = [record for record in records if record.step % self.save_period == 0]
        keep.update(record.step for record in self._best_first(periodic)[: self.config.keep_top_k])
        keep.update(newest_first[: self.config.ft_keep_latest_k or 0])
        for record in records:
            if record.step not in keep:
                self._store.remove(record.path)

    def _best_first(self, records: list[CheckpointRecord]) -> list[CheckpointRecord]:
        def rank(record: CheckpointRecord) -> tuple[bool, float, int]:
            value = as_number(record.info.get(self.metric_name)) if self.metric_name else None
            if value is None or value != value:  # no metric, or NaN
                return (False, 0.0, record.step)
            return (True, value if self.config.higher_is_better else -value, record.step)

        return sorted(records, key=rank, reverse=True)
