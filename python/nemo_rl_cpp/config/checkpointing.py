"""The `checkpointing` section."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from .base import Positive, Section, key

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"{_PART}(/{_PART})?")


def repository_name(name: str) -> str:
    """Return `name`, a repository on the Hugging Face Hub. Raise ValueError if it cannot be such a name."""
    if not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise ValueError(
            f"is {name!r}: give the name of a repository, organisation/name, of letters, digits, '-', '_' and '.'"
        )
    return name


RepositoryName = Annotated[str, AfterValidator(repository_name)]


class CheckpointingConfig(Section):
    """When a checkpoint is written and which ones are kept. A checkpoint contains a Hugging Face folder."""

    enabled: bool = key(True, "write checkpoints")
    checkpoint_dir: str = key("results/grpo", "folder of the run; the same folder resumes it")
    resume: Literal["auto", "never", "must"] = key(
        "auto",
        "auto: resume from the newest whole checkpoint of checkpoint_dir, or begin; never: begin, and refuse a folder that holds "
        "checkpoints; must: refuse a folder that holds none",
    )
    metric_name: str | None = key(
        "val:accuracy", "metric that ranks checkpoints, train:NAME or val:NAME; null: newer ones rank higher"
    )
    higher_is_better: bool = key(True, "direction of the metric")
    keep_top_k: Positive | None = key(3, "number of checkpoints to keep, by rank (the latest always stays); null: all")
    save_period: Positive = key(10, "steps between checkpoints")
    checkpoint_must_save_by: str | None = key(
        None,
        "DD:HH:MM:SS after which a checkpoint is written and the run ends, stopped in time; nothing is uploaded then",
    )
    save_optimizer: bool = key(
        True,
        "write the optimizer's state; false: a checkpoint is a quarter of the size or less, and a resumed run begins with new moments and "
        "a new learning-rate schedule",
    )
    push_to_hub: RepositoryName | None = key(
        None,
        "repository of the hub, organisation/name, to which the last checkpoint's policy goes when the run has finished; null: none",
    )
    hub_private: bool = key(True, "a repository that push_to_hub makes is private")
    ft_keep_latest_k: Positive | None = key(None, "further keep the newest k")
    ft_save_period: Positive | None = key(None, "steps between additional saves")
    model_save_format: Literal["safetensors"] | None = key("safetensors", "safetensors (null means the same)")
