"""What a checkpoint of a training run holds, when it is written, and how a run goes on from one.

    step_N/
      policy/weights/           Hugging Face folder with the tokenizer and a model card
      policy/optimizer/         with checkpointing.save_optimizer
      value/...                 the same of PPO's critic
      train_dataloader.json     position in the data
      trainer_state/sampler.*   prompt groups kept for the next step: JSON and safetensors, nothing that runs code
      trainer_state/ready_batches.*  rollouts that were made beside training for later steps (`algorithms.collector.py`)
      trainer_state/identity.json   which model, tokenizer and rows these are, see `algorithms/resume.py`
      training_info.json        TrainState: steps, epochs, the draw counter that keys all random numbers

Nothing else of ours has a state: every random number is a function of the seed and of what is saved here. Functions of the
user's (`data.custom_dataloader`, rewards, callbacks) are to keep none that a resumed run would miss.

The model card and the upload to the hub are here, too: what a run tells others of its model.
"""

from __future__ import annotations

import json
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from nemo_rl_cpp.algorithms.collector import RolloutCollector
from nemo_rl_cpp.algorithms.custom_components import OwnEstimator, OwnLoss
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler, SamplerState
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import mean_word
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.checkpoints.model_card import CardFacts, write_card
from nemo_rl_cpp.checks.resumed import IDENTITY
from nemo_rl_cpp.config.access import to_json
from nemo_rl_cpp.config.data import DataConfig, environments_of_training
from nemo_rl_cpp.config.memory import size_text
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.utils import load_dataloader_state, save_dataloader_state
from nemo_rl_cpp.errors import short_path
from nemo_rl_cpp.files.durable import disk_trouble
from nemo_rl_cpp.files.folder_lock import FolderError
from nemo_rl_cpp.files.plain_state import read_state, write_state
from nemo_rl_cpp.models.hub_upload import push_to_hub
from nemo_rl_cpp.models.policy.train_step import NonFiniteError

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.observe import StepReport
    from nemo_rl_cpp.algorithms.run import TrainingRun


SAMPLER_STATE = Path("trainer_state") / "sampler"
READY_BATCHES = Path("trainer_state") / "ready_batches"


class NotSavedError(FolderError):
    """The last checkpoint of a run could not be written for want of space."""


class Resume(NamedTuple):
    """Where a run goes on: the newest whole checkpoint, or nothing for a new run."""

    path: Path | None
    state: TrainState

    def model_paths(self, component: str) -> tuple[Path | None, Path | None]:
        """(weights folder, optimizer folder) of `policy` or `value`; None where there is none."""
        return CheckpointManager.get_resume_paths(self.path, model_component=component)

    def load_data_position(
        self, loader: StatefulDataLoader | MultipleDataloaderWrapper, data_config: DataConfig
    ) -> None:
        if self.path is not None:
            load_dataloader_state(loader, str(self.path), data_config)

    def load_sampler(self, sampler: GroupSampler) -> None:
        """Prompt groups that the last step left for the next one. They are dropped, and that is said, when the sampler is
        set to keep none or to make groups of another size: they would be no groups of this run."""
        if self.path is None or (kept := _kept_groups(self.path)) is None:
            return
        if kept["cache"] is not None and not sampler.takes(kept["cache"]):
            print(
                "The prompt groups that the checkpoint kept for the next step are left out: the settings of dynamic sampling changed."
            )
        else:
            sampler.load_state_dict(kept)

    def load_ready_batches(self, collection: RolloutCollector) -> None:
        """Rollouts that were made for later steps."""
        if self.path is not None and (self.path / READY_BATCHES).with_suffix(".json").is_file():
            collection.load_state_dict(read_state(self.path / READY_BATCHES))


def _kept_groups(checkpoint: Path) -> SamplerState | None:
    file = checkpoint / SAMPLER_STATE
    if file.with_suffix(".json").is_file():
        return read_state(file)
    pickled = file.with_suffix(".pt")
    if not pickled.is_file():
        return None
    try:
        return torch.load(pickled, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{pickled} holds more than plain data, which could run code, so it is not read: move it away to sample the prompt groups "
            "that it keeps for the next step anew"
        ) from error


def find_resume(checkpoints: CheckpointManager | None) -> Resume:
    """The newest whole checkpoint of `checkpointing.checkpoint_dir`, every file verified; a fresh state if there is none.

    ResumeError (a ValueError) where `checkpointing.resume` forbids what is found, and where there are checkpoints but none
    is whole: beginning again would bury what can perhaps be saved.
    """
    path = checkpoints.get_latest_checkpoint_path() if checkpoints is not None and checkpoints.enabled else None
    if checkpoints is not None and checkpoints.enabled:
        checkpoints.check_resume_mode(path)
    if path is None:
        return Resume(None, TrainState())
    return Resume(Path(path), TrainState.from_training_info(checkpoints.load_training_info(path)))


def save_checkpoint(run: TrainingRun, metric: dict[str, float]) -> Path:
    """Saves everything that the run needs to go on after step `state.step`, and returns the checkpoint's folder.

    The logs are synced first, so that no checkpoint is newer than its logs.
    """
    checkpoints, state = run.services.checkpoints, run.state
    run.services.logger.flush()
    run.collection.settle()
    with checkpoints.saving(state.step, state.to_training_info(metric), run.config) as folder:
        for name, model in run.models.items():
            optimizer = folder / name / "optimizer" if checkpoints.save_optimizer else None
            model.save_checkpoint(folder / name / "weights", optimizer, checkpointing_cfg=run.config.checkpointing)
        write_card(folder / "policy" / "weights", run.config, card_facts(run))
        save_dataloader_state(run.prompts.loader, folder)
        (folder / SAMPLER_STATE).parent.mkdir(exist_ok=True)
        if kept := run.sampler.state_dict():
            write_state(folder / SAMPLER_STATE, kept)
        if ready := run.collection.state_dict():
            write_state(folder / READY_BATCHES, ready)
        if checkpoints.identity:
            (folder / IDENTITY).write_text(
                json.dumps(checkpoints.identity, indent=1, sort_keys=True) + "\n", encoding="utf-8"
            )
    return Path(folder).with_name(f"step_{state.step}")


def save_if_due(run: TrainingRun, metric: Callable[[], dict[str, float]], **reasons: bool) -> None:
    """A checkpoint after step `state.step`, if one is due by `CheckpointManager.save_reason(**reasons)`, or is owed because
    an earlier one found no space and there is space again. `metric()` gives the checkpoint metric.

    A save that fails for want of space is said once; the run goes on. At its end that is an error (NotSavedError). Weights
    that are not finite are never saved: NonFiniteError names the first bad parameter.
    """
    checkpoints = run.services.checkpoints
    reason = checkpoints.save_reason(run.state.step, **reasons)
    if reason is None and not (checkpoints.owed and _free(checkpoints) > _size(run)):
        return
    check_weights(run)
    began = time.monotonic()
    with run.services.timer("checkpointing"):
        try:
            saved = save_checkpoint(run, metric())
        except Exception as error:
            if (trouble := disk_trouble(error)) is None:
                raise
            _not_saved(run, trouble, error)
            return
        if checkpoints.owed:
            _say(run, f"step {run.state.step} is saved: {checkpoints.checkpoint_dir} has space again")
        checkpoints.owed = False
    if run.services.progress is not None:
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        run.services.progress.print(f"saved {short_path(saved)}: {size_text(size)} in {time.monotonic() - began:.1f} s")
    run.services.callbacks.checkpoint(run, saved)


def check_metric_name(run: TrainingRun, report: StepReport | None, val_metrics: Metrics | None) -> None:
    """ValueError when `checkpointing.metric_name` is none of the metrics that there are: asked after the first step, and after
    the first validation (before a step: `report` None), so that no save finds out. Nothing once the name was seen."""
    checkpoints = run.services.checkpoints
    kind, _, name = ((checkpoints and checkpoints.metric_name) or "").partition(":")
    if not name or not checkpoints.enabled or checkpoints.metric_seen or (kind == "train" and report is None):
        return
    if kind == "train":
        known: Iterable[str] | None = report.metrics
    elif val_metrics is not None:
        known = val_metrics
    else:
        known = run.validator.gives(report.rollout_names, run.environments.train) if run.validator is not None else None
        if known is None or name in known:
            return  # the first validation tells
    if name not in known:
        raise _no_metric(checkpoints, known)
    checkpoints.metric_seen = True


def _no_metric(checkpoints: CheckpointManager, known: Iterable[str]) -> ValueError:
    kind, _, name = checkpoints.metric_name.partition(":")
    return ValueError(
        f"checkpointing.metric_name={checkpoints.metric_name!r}: the {kind} metrics have no {name!r}; there are {', '.join(sorted(known))}"
    )


def metric_of(run: TrainingRun, metrics: Metrics, val_metrics: Metrics | None, quiet: bool = False) -> dict[str, float]:
    """The metric that ranks a checkpoint. None, and that is said once a run (unless `quiet`), where no validation ran on this
    step or where a metric that was there before is missing."""
    checkpoints = run.services.checkpoints
    kind, _, name = (checkpoints.metric_name or "").partition(":")
    there = val_metrics if kind == "val" else metrics
    if not name:
        return {}
    if there and name in there:
        return {checkpoints.metric_name: float(there[name])}
    if there and not checkpoints.metric_seen:
        raise _no_metric(checkpoints, there)
    if not quiet and not checkpoints.metric_missed:
        checkpoints.metric_missed = True
        why = (
            f"this step's {kind} metrics have no {name!r}"
            if there
            else "no validation ran on this step: make save_period a multiple of val_period, or set val_at_end"
        )
        _say(
            run,
            f"warning: the checkpoint is saved without checkpointing.metric_name={checkpoints.metric_name}, by which it would be ranked ({why})",
        )
    return {}


def _not_saved(run: TrainingRun, trouble: str, error: Exception) -> None:
    checkpoints, state = run.services.checkpoints, run.state
    text = (
        f"step {state.step} could not be saved in {checkpoints.checkpoint_dir} ({trouble}): {size_text(_free(checkpoints))} are free there, a "
        f"checkpoint takes about {size_text(_size(run))}"
    )
    if state.finished:
        raise NotSavedError(
            f"{text}. This was the run's last save: free space and start it again (it goes on from the newest checkpoint there), or "
            "change checkpointing.checkpoint_dir"
        ) from error
    if not checkpoints.owed:
        _say(
            run,
            f"warning: {text}. The run goes on and tries again when there is space, at the next period and at its end",
        )
    checkpoints.owed = True


def _say(run: TrainingRun, text: str) -> None:
    if run.services.progress is not None:
        run.services.progress.print(text)
    else:
        warnings.warn(text, stacklevel=2)


def _free(checkpoints: CheckpointManager) -> int:
    return shutil.disk_usage(checkpoints.checkpoint_dir).free


def _size(run: TrainingRun) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(model.checkpoint_bytes(run.services.checkpoints.save_optimizer) for model in run.models.values())


def check_weights(run: TrainingRun) -> None:
    """NonFiniteError that names the first parameter that is not finite, of any model that is trained."""
    for name, model in run.models.items():
        if bad := model.non_finite_parameters():
            raise NonFiniteError(
                f"{name}: after step {run.state.step} {len(bad)} parameters are not finite, first {', '.join(bad[:3])}; nothing was saved, "
                f"earlier checkpoints are untouched. The learning rate is {to_json(model.learning_rate)}: lower it"
            )


def card_facts(run: TrainingRun) -> CardFacts:
    """Of the present step."""
    services, results = run.services, {}
    if services.history:
        results["reward, last step"] = services.history[-1]["reward"]
    if services.validations and services.validations[-1]["step"] == run.state.step:
        last = services.validations[-1]
        results[f"validation {mean_word(last)}"] = last["accuracy"]
    own = {"loss_fn": run.loss_fn, "adv_estimator": run.advantages.estimator}
    components = {what: each.name for what, each in own.items() if isinstance(each, (OwnLoss, OwnEstimator))}
    return CardFacts(run.state.step, _rewards(run), results, components)


def _rewards(run: TrainingRun) -> list[str]:
    """The names of environments; of reward functions their own, with their weights."""
    found: list[str] = []
    used = environments_of_training(run.config.data)
    section = (
        run.config.env.get("reward_functions") if used == {"reward_functions"} else None
    )  # else it may be another task's
    for task, environment in run.environments.train.items():
        described = getattr(getattr(environment, "_instance", environment), "described", None)
        if isinstance(described, list):
            found += described
            continue
        functions = section.get("functions") if isinstance(section, Mapping) else None
        given = [functions] if isinstance(functions, str) else functions
        found += list(given) if isinstance(given, list) else [task]
    return list(dict.fromkeys(found))


def publish(run: TrainingRun) -> dict[str, str]:
    """Uploads the last checkpoint where `checkpointing.push_to_hub` names a repository; the row of the summary. A failure is told
    there and loses nothing."""
    config = run.config.checkpointing
    repository, private = config.push_to_hub, config.hub_private
    if repository is None or not run.services.saves or not run.state.step:
        return {}
    folder = run.services.checkpoints.checkpoint_dir / f"step_{run.state.step}"
    try:
        return {"hub": push_to_hub(folder, repository, private=private)}
    except ValueError as error:
        return {"hub": f"not uploaded: {error}"}
    except KeyboardInterrupt:  # the run is over and saved: only the upload is given up
        return {
            "hub": f"not uploaded: the upload to {repository} was interrupted; nemo_rl_cpp.push_to_hub does it again"
        }
