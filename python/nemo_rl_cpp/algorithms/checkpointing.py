"""Checkpoints of a training run: their content, when they are written, and how a run resumes from them.

    step_N/
      policy/weights/           Hugging Face folder with the tokenizer and a model card
      policy/optimizer/         with checkpointing.save_optimizer
      value/...                 the same for PPO's critic
      train_dataloader.json     position in the data
      trainer_state/sampler.*   prompt groups kept for the next step: JSON and safetensors, nothing that runs code
      trainer_state/ready_batches.*  rollouts generated ahead for later steps (`algorithms/collector.py`)
      training_info.json        TrainState: steps, epochs, the draw counter that seeds all random numbers

No other part of this package has state: every random number is a function of the seed and of what is saved here. User
code (`data.custom_dataloader`, rewards, callbacks) must not keep state, because a resumed run would lack it.

The module also uploads checkpoints to the Hub."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.algorithms.collector import RolloutCollector
from nemo_rl_cpp.algorithms.hooks import StepResult, Terminal
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import Validator
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.checks import folders
from nemo_rl_cpp.config.access import to_json
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.dataloader import save_dataloader_state
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.errors import short_path
from nemo_rl_cpp.files.durable import disk_trouble
from nemo_rl_cpp.files.folder_lock import FolderError
from nemo_rl_cpp.files.plain_state import read_state, write_state
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.hub_upload import push_to_hub, write_card
from nemo_rl_cpp.models.interfaces import TrainedModelInterface
from nemo_rl_cpp.models.memory import size_text
from nemo_rl_cpp.models.policy.train_step import NonFiniteError

SAMPLER_STATE = Path("trainer_state") / "sampler"
READY_BATCHES = Path("trainer_state") / "ready_batches"


class NotSavedError(FolderError):
    """Raised if the last checkpoint of a run cannot be written because the disk is full."""


class Resume(NamedTuple):
    """The point from which a run resumes: the newest complete checkpoint, or no checkpoint for a new run."""

    path: Path | None
    state: TrainState

    def load_rollouts(self, collector: RolloutCollector) -> None:
        """Restore in `collector` the prompt groups that dynamic sampling had kept, and rollouts that were generated
        ahead. Drop groups that the sampler cannot use, with a note."""
        if self.path is None:
            return
        if (self.path / SAMPLER_STATE).with_suffix(".json").is_file():
            kept = read_state(self.path / SAMPLER_STATE)
            if kept["cache"] is not None and not collector.sampler.takes(kept["cache"]):
                print(
                    "Dropped the prompt groups that the checkpoint kept for the next step, because the settings of dynamic sampling changed."
                )
            else:
                collector.sampler.load_state_dict(kept)
        if (self.path / READY_BATCHES).with_suffix(".json").is_file():
            collector.load_state_dict(read_state(self.path / READY_BATCHES))


def find_resume(checkpoints: CheckpointManager) -> Resume:
    """Return the newest complete checkpoint with every file verified, or a fresh state.

    Raise ResumeError (a ValueError) if `checkpointing.resume` does not allow this, or if there are checkpoints but none
    is complete, since a new run could overwrite files that can still be recovered."""
    if not checkpoints.enabled:
        return Resume(None, TrainState())
    path = checkpoints.get_latest_checkpoint_path()
    checkpoints.check_resume_mode(path)
    if path is None:
        return Resume(None, TrainState())
    return Resume(Path(path), TrainState.from_training_info(checkpoints.load_training_info(path)))


# ---- saving


@dataclass
class Saver:
    """The writer of a run's checkpoints. A checkpoint has everything that the run needs to resume."""

    manager: CheckpointManager
    config: TrainMasterConfig
    models: Mapping[str, TrainedModelInterface]  # the models to save, keyed by the name of their checkpoint folder
    collector: RolloutCollector
    validator: Validator | None
    environments: Mapping[str, Environment]
    logger: Logger
    timer: Timer
    terminal: Terminal
    seen: set[str] = field(default_factory=set)  # keys whose metric was found among those of this run

    def after_step(self, result: StepResult) -> None:
        """Save a checkpoint if `CheckpointManager.save_reason` returns a reason, or if an earlier save failed because
        the disk was full and there is space now.

        If the disk is full, warn once and continue; at the end of the run raise NotSavedError instead. Weights that are
        not finite are never saved: raise NonFiniteError, whose message lists the first such parameters."""
        self.check_metric_names(result)
        manager, state = self.manager, result.state
        reason = manager.save_reason(
            state.step, is_last=state.finished, early_stop=result.reached_target, timeout=result.timed_out,
            interrupted=result.interrupted,
        )  # fmt: skip
        free, size = self._space() if manager.owed else (0, 0)
        if reason is None and free <= size:
            if state.finished and not manager.enabled:
                self._check_weights(state)
            return
        self._check_weights(state)
        began = time.monotonic()
        with self.timer("checkpointing"):
            try:
                saved = self._save(result)
            except Exception as error:
                if (trouble := disk_trouble(error)) is None:
                    raise
                self._not_saved(state, trouble, error)
                return
            if manager.owed:
                self.terminal.progress.print(f"step {state.step} is saved: {manager.checkpoint_dir} has space again")
            manager.owed = False
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        removed = f"; removed {', '.join(manager.removed)}" if manager.removed else ""
        self.terminal.progress.print(
            f"saved {short_path(saved)}: {size_text(size)} in {time.monotonic() - began:.1f} s{removed}"
        )
        result.checkpoint = saved

    def _save(self, result: StepResult) -> Path:
        """Write the checkpoint and return its folder. Flush the logs first, so that they are never older than it."""
        manager, state, collector = self.manager, result.state, self.collector
        metric = self._metric_of(result)
        self.logger.flush()
        collector.settle()
        with manager.saving(state.step, state.to_training_info(metric), self.config) as folder:
            for name, model in self.models.items():
                optimizer = folder / name / "optimizer" if manager.save_optimizer else None
                model.save_checkpoint(folder / name / "weights", optimizer)
            write_card(folder / "policy" / "weights", self.config, state.step)
            save_dataloader_state(collector.prompts.loader, folder)
            (folder / SAMPLER_STATE).parent.mkdir(exist_ok=True)
            if kept := collector.sampler.state_dict():
                write_state(folder / SAMPLER_STATE, kept)
            if ready := collector.state_dict():
                write_state(folder / READY_BATCHES, ready)
        return Path(folder).with_name(f"step_{state.step}")

    def check_metric_names(self, result: StepResult) -> None:
        """Raise ValueError if the run lacks the metric of `checkpointing.metric_name`, "train:NAME" or "val:NAME", or of
        `stop_at_validation_metric`. Called before training and after each step, so that the error comes before the
        first save."""
        kind, _, name = (self.manager.metric_name or "").partition(":")
        if self.manager.enabled:
            self._check_name("checkpointing.metric_name", kind, name, result)
        stop = self.config.loop.stop_at_validation_metric
        self._check_name(f"{self.config.algorithm}.stop_at_validation_metric", "val", stop, result)

    def _check_name(self, key: str, kind: str, name: str | None, result: StepResult) -> None:
        """Raise ValueError, which names `key`, if the `kind` metrics ("train" or "val") have no `name`."""
        if not name or key in self.seen:
            return
        # a step that trains only on groups that dynamic sampling kept has no rollouts, so their metrics are missing
        known: Iterable[str] | None = None
        if kind == "train":
            known = result.metrics if result.rollout_names else None
        elif result.validation is not None:
            known = result.validation.metrics
        elif self.validator is not None and result.rollout_names:
            known = self.validator.gives(result.rollout_names, self.environments)
            if known is not None and name in known:
                return  # checked again at the first validation
        if not known:  # the names of the metrics are not known yet
            return
        if name not in known:
            raise ValueError(f"{key}: the {kind} metrics have no {name!r}; there are {', '.join(sorted(known))}")
        self.seen.add(key)

    def _metric_of(self, result: StepResult) -> dict[str, float]:
        """Return {`metric_name`: value} of the metric that ranks checkpoints, or {} with a warning, once per run."""
        manager = self.manager
        kind, _, name = (manager.metric_name or "").partition(":")
        validation = result.validation.metrics if result.validation else None
        there = validation if kind == "val" else result.metrics
        if not name:
            return {}
        if there and name in there:
            return {manager.metric_name: float(there[name])}
        if not result.interrupted and not manager.metric_missed:
            manager.metric_missed = True
            why = "no validation ran on this step: make save_period a multiple of val_period, or set val_at_end"
            if self.validator is None:
                why = "there is no validation data: set data.validation, or metric_name to train:NAME or null"
            why = f"this step's {kind} metrics have no {name!r}" if there else why
            self.terminal.progress.print(
                f"warning: the checkpoint is saved without checkpointing.metric_name={manager.metric_name}, by which it would "
                f"be ranked ({why})"
            )
        return {}

    def _not_saved(self, state: TrainState, trouble: str, error: Exception) -> None:
        manager, (free, size) = self.manager, self._space()
        text = (
            f"step {state.step} could not be saved in {manager.checkpoint_dir} ({trouble}): {size_text(free)} are free "
            f"there, a checkpoint takes about {size_text(size)}"
        )
        if state.finished:
            raise NotSavedError(
                f"{text}. This was the run's last save: free space and start it again (it resumes from the newest checkpoint "
                "there), or change checkpointing.checkpoint_dir"
            ) from error
        if not manager.owed:
            self.terminal.progress.print(
                f"warning: {text}. The run continues and tries again when there is space, at the next period and at its end"
            )
        manager.owed = True

    def _space(self) -> tuple[int, int]:
        """Return (free bytes in the checkpoint folder, bytes of the tensors that a checkpoint of this run contains)."""
        size = sum(model.checkpoint_bytes(self.manager.save_optimizer) for model in self.models.values())
        return shutil.disk_usage(self.manager.checkpoint_dir).free, size

    def _check_weights(self, state: TrainState) -> None:
        """Raise NonFiniteError if a trained model has parameters that are not finite."""
        for name, model in self.models.items():
            if bad := model.non_finite_parameters():
                raise NonFiniteError(
                    f"{name}: after step {state.step} {len(bad)} parameters are not finite, first {', '.join(bad[:3])}; nothing "
                    f"was saved, earlier checkpoints are untouched. The learning rate is {to_json(model.learning_rate)}: lower it"
                )


# ---- upload


def publish(config: CheckpointingConfig, checkpoint: Path | None) -> dict[str, str]:
    """Upload a checkpoint if `checkpointing.push_to_hub` is set, and return a row for the summary table, which also
    reports a failed or interrupted upload."""
    repository, private = config.push_to_hub, config.hub_private
    if repository is None or checkpoint is None:
        return {}
    try:
        said = push_to_hub(checkpoint, repository, private=private)
    except ValueError as error:
        said = f"not uploaded: {error}"
    except KeyboardInterrupt:  # the run is over and saved: only the upload is cancelled
        said = f"not uploaded: the upload to {repository} was interrupted; nemo_rl_cpp.push_to_hub does it again"
    return {"hub": said}


# ---- resuming


def open_checkpoints(checkpoints: CheckpointManager, config: TrainMasterConfig) -> Resume:
    """Lock the checkpoint folder until `CheckpointManager.shutdown`, and return where to resume. Raise ResumeError for
    another run's checkpoint (`checks/folders.py`), FolderError for another run's lock (both ValueErrors)."""
    checkpoints.claim()
    resume = find_resume(checkpoints)
    if resume.path is not None:
        announce(resume, config)
    return resume


def announce(resume: Resume, config: TrainMasterConfig) -> None:
    """Print from which checkpoint the run resumes, which keys changed, and, if no steps or epochs are left, how to
    train on. Raise ResumeError if the checkpoint belongs to a different run."""
    saved = folders.read_saved(resume.path)
    if refused := list(folders.refusals(saved, config)):
        raise ResumeError(folders.refusal_text(saved, refused))
    print(folders.headline(saved, folders.changes(saved, config)), flush=True)
    if unknown := folders.environment_keys(config):
        print(f"Not compared, since their values come from environment variables: {', '.join(unknown)}", flush=True)
    section, loop, state = config.algorithm, config.loop, resume.state
    for unit, done, limit in (
        ("steps", state.total_steps, loop.max_num_steps),
        ("epochs", state.current_epoch, loop.max_num_epochs),
    ):
        if limit is not None and done >= limit:
            key = f"{section}.max_num_{unit}"
            print(
                f"{short_path(resume.path)} has {done} {unit}, and {key} is {limit}: nothing is left to train. Raise {key} to "
                "train on; for a new run give another checkpointing.checkpoint_dir",
                flush=True,
            )
            return
