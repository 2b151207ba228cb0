"""The `data` section: data sets, prompts and processors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Tag

from .base import Int, Positive, Real, Section, key, no_effect, section

# Keys of each data set beyond the common ones; a name with a dot is a class of the user's and takes any keys.
_SPLIT = ("split", "split_validation_size", "seed", "size")
_FILE = (*_SPLIT, "data_path", "input_key", "output_key", "subset", "filter")
DATASET_KEYS: dict[str, tuple[str, ...]] = {
    "OpenMathInstruct-2": (*_SPLIT, "output_key", "prompt_file"),
    "DAPOMath17K": _SPLIT,
    "DAPOMathAIME2024": (*_SPLIT, "repeat"),
    "DeepScaler": _SPLIT,
    "AIME2024": (*_SPLIT, "repeat", "variant"),
    "AIME2025": (*_SPLIT, "repeat", "variant"),
    "AIME2026": (*_SPLIT, "repeat", "variant"),
    "GSM8K": (*_SPLIT, "subset"),
    "ResponseDataset": _FILE,
    "arithmetic": (*_SPLIT, "max_number", "num_shots", "operators", "num_terms"),
    "reverse_digits": (*_SPLIT, "num_digits"),
    "reasoning_gym": (*_SPLIT, "task", "task_config", "num_shots"),
}


class DatasetDefaults(Section):
    """What every data set may set; `data.default` fills in what a data set leaves out."""

    model_config = ConfigDict(extra="allow")

    prompt_file: str | None = key(None, "text with {} for the question")
    system_prompt_file: str | None = key(None, "text of the system message")
    processor: str | None = key(None, "registered processor that makes a sample (math_hf_data_processor)")
    env_name: str | None = key(None, "environment that scores it, a key of `env`")


class DatasetConfig(DatasetDefaults):
    """One data set. Further keys depend on dataset_name."""

    dataset_name: str = key(..., "known name, ResponseDataset with data_path, or a class package.module.Name")
    split_validation_size: Real | None = key(None, "share (0 to 1) of the data held out for validation; null: none", ge=0, lt=1)
    seed: Int | None = key(None, "seed of the split or of generated data")


def _form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


Datasets = Annotated[
    Annotated[DatasetConfig, Tag("one")] | Annotated[list[DatasetConfig], Tag("many")], Discriminator(_form)
]


class DataConfig(Section):
    """Where prompts come from and how they become samples."""

    train: Datasets | None = key(None, "data set to train on, or a list of them")
    validation: Datasets | None = key(None, "data set to validate on, or a list; null: the part held out from train, if any")
    default: DatasetDefaults | None = section(DatasetDefaults, "settings of all data sets that do not have their own")
    max_input_seq_length: Positive | None = key(None, "prompts of this many tokens or more are cut and get no gradient; null: no limit")
    shuffle: bool = key(True, "shuffle the training data")
    num_workers: Int = key(1, "loader processes", ge=0)
    use_multiple_dataloader: bool = key(False, "a loader of its own for each data set")
    num_prompts_per_dataloader: Positive | None = key(None, "prompts from each loader when there are several")
    custom_dataloader: str | None = no_effect(None)


class EvalDataConfig(DatasetConfig):
    """The data set of an evaluation."""

    max_input_seq_length: Positive | None = key(None, "prompts of this many tokens or more are cut; null: no limit")
    repeat: Positive = key(1, "times that the data set is repeated")


def datasets_of(value: Any, dotted: str) -> list[tuple[str, DatasetConfig]]:
    """Each data set with its dotted key."""
    if value is None:
        return []
    if isinstance(value, list):
        return [(f"{dotted}.{i}", item) for i, item in enumerate(value)]
    return [(dotted, value)]
