"""What a checkpoint of a training run holds, and how a run goes on from one.

    step_N/
      policy/weights/           Hugging Face folder with the tokenizer
      policy/optimizer/         with checkpointing.save_optimizer
      value/...                 the same of PPO's critic
      train_dataloader.json     position in the data
      trainer_state/sampler.pt  prompt groups kept for the next step, if there are any
      training_info.json        TrainState: steps, epochs, the draw counter that keys all random numbers

Nothing else has a state: every random number is a function of the seed and of what is saved here.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.data.utils import load_dataloader_state, save_dataloader_state
from nemo_rl_cpp.utils.checkpoint import CheckpointManager

SAMPLER_STATE = Path("trainer_state") / "sampler.pt"


class Resume(NamedTuple):
    """Where a run goes on: the newest whole checkpoint, or nothing for a new run."""

    path: Path | None
    state: TrainState

    def model_paths(self, component: str) -> tuple[Path | None, Path | None]:
        """(weights folder, optimizer folder) of `policy` or `value`; None where there is none."""
        return CheckpointManager.get_resume_paths(self.path, model_component=component)

    def load_data_position(self, loader: Any, data_config: Any) -> None:
        if self.path is not None:
            load_dataloader_state(loader, str(self.path), data_config)

    def load_sampler(self, sampler: Any) -> None:
        if self.path is not None and (self.path / SAMPLER_STATE).is_file():
            # written by this program beside the weights; holds message logs, which are not plain tensors
            sampler.load_state_dict(torch.load(self.path / SAMPLER_STATE, weights_only=False))


def find_resume(checkpoints: CheckpointManager | None) -> Resume:
    """The newest whole checkpoint of `checkpointing.checkpoint_dir`, every file verified; a fresh state if there is none."""
    path = checkpoints.get_latest_checkpoint_path() if checkpoints is not None and checkpoints.enabled else None
    if path is None:
        return Resume(None, TrainState())
    return Resume(Path(path), TrainState.from_training_info(checkpoints.load_training_info(path)))


def save_checkpoint(parts: Any, config: Any, state: TrainState, metric: dict[str, float]) -> Path:
    """Saves everything that `parts` needs to go on after step `state.step`, and returns the checkpoint's folder.

    The logs are synced first, so that no checkpoint is newer than its logs.
    """
    checkpoints = parts.run.checkpoints
    parts.run.logger.flush()
    with checkpoints.saving(state.step, state.to_training_info(metric), config) as folder:
        for name, model in parts.models.items():
            optimizer = folder / name / "optimizer" if checkpoints.save_optimizer else None
            model.save_checkpoint(folder / name / "weights", optimizer, checkpointing_cfg=config.checkpointing)
        save_dataloader_state(parts.prompts.loader, folder)
        kept = parts.sampler.state_dict()
        if kept:
            (folder / SAMPLER_STATE).parent.mkdir(exist_ok=True)
            torch.save(kept, folder / SAMPLER_STATE)
    return Path(folder).with_name(f"step_{state.step}")
