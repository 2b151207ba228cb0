"""The `checkpointing` section."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from .base import Folder, Positive, Section, key

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"{_PART}(/{_PART})?")


def repository_name(name: str) -> str:
    """Return `name` unchanged. Raise ValueError if it is not a valid repository name of the Hugging Face Hub."""
    if not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise ValueError(f"is {name!r}: give the name of a repository, organisation/name, of letters, digits, '-._'")
    return name


RepositoryName = Annotated[str, AfterValidator(repository_name)]


class CheckpointingConfig(Section):
    """Settings of writing, keeping and resuming checkpoints. Each has a model folder in Hugging Face format."""

    enabled: bool = key(True, "Write checkpoints.")
    checkpoint_dir: Folder = "results/grpo"
    """Folder of the run's checkpoints. A run with the same folder resumes from it."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the newest complete checkpoint in checkpoint_dir, or start from scratch. never: start from
    scratch; checkpoints in the folder are an error. must: resume; a folder without any is an error."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints for keep_top_k: train:NAME or val:NAME. null: newer checkpoints rank higher."""
    higher_is_better: bool = key(True, "Whether a higher value of metric_name is better.")
    keep_top_k: Positive | None = 3
    """Number of checkpoints to keep, the best by metric_name among the steps that are multiples of save_period. The
    latest is always kept as well; other steps, such as the last of an earlier run, are then removed. null: keep all."""
    save_period: Positive = key(10, "Number of steps between checkpoints.")
    checkpoint_must_save_by: str | None = None
    """Time limit as DD:HH:MM:SS, after which the run writes a checkpoint and ends, without an upload. null: none."""
    save_optimizer: bool = True
    """Write the state of the optimizer. false: a checkpoint has a quarter of the size or less, but a resumed run starts
    with new moments and a new learning-rate schedule."""
    push_to_hub: RepositoryName | None = None
    """Repository on the Hugging Face Hub, organisation/name. When the run has finished, the policy of the last
    checkpoint is uploaded to it. null: no upload."""
    hub_private: bool = key(True, "If push_to_hub creates the repository, make it private.")
    ft_keep_latest_k: Positive | None = None
    """Number of newest checkpoints to keep in addition to those of keep_top_k. null: none."""
    ft_save_period: Positive | None = None
    """Number of steps between additional checkpoints: ft_keep_latest_k counts them, keep_top_k does not. null: none."""
    model_save_format: Literal["safetensors"] | None = "safetensors"
    """File format of the weights. safetensors is the only one; null means the same."""
