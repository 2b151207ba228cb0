"""The `data` section: datasets, prompt files and processors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from nemo_rl_cpp.dotted_names import is_dotted

from .access import as_written
from .base import Entry, Int, Positive, Section, Table, key, section


@dataclass(frozen=True)
class DatasetEntry(Entry):
    """The definition of a dataset: its class, and its keys in addition to those of `DatasetConfig`."""

    keys: tuple[str, ...] = ()


def _dataset(target: str, *keys: str) -> DatasetEntry:
    return DatasetEntry(f"nemo_rl_cpp.data.datasets.response_datasets.{target}", keys)


_HUB = ("split", "repeat")
_MATH = ("DAPOMath17K", "DAPOMathAIME2024", "DeepScaler", "AIME2024", "AIME2025", "AIME2026")
_MULTICHOICE = ("gpqa", "gpqa_diamond", "mmlu", "mmlu_pro")
_GENERATED = ("split", "num_samples")
DATASET_REGISTRY: Table[DatasetEntry] = Table(
    "data set",
    {
        "OpenMathInstruct-2": _dataset("hub_math:OpenMathDataset", *_HUB, "output_key"),
        **dict.fromkeys(_MATH, _dataset("hub_math:HubDataset", *_HUB)),
        "GSM8K": _dataset("hub_math:GSM8KDataset", *_HUB),
        **dict.fromkeys(("math", "math500"), _dataset("hub_math:HubDataset", *_HUB)),
        **dict.fromkeys(_MULTICHOICE, _dataset("hub_math:HubMultichoiceDataset", *_HUB)),
        "ResponseDataset": _dataset(
            "response_dataset:ResponseDataset", "data_path", "input_key", "output_key", "subset", "split"
        ),
        "arithmetic": _dataset("generated:ArithmeticDataset", *_GENERATED, "max_number", "num_shots"),
        "reverse_digits": _dataset("generated:ReverseDigitsDataset", *_GENERATED, "num_digits"),
        "python_functions": _dataset("generated:PythonFunctionsDataset", *_GENERATED, "num_shots"),
        "guess_number": _dataset(
            "generated:GuessNumberDataset", *_GENERATED, "min_number", "max_number", "prompt", "stop_strings"
        ),
        "NemoGymDataset": _dataset("agent_tasks:NemoGymDataset", "data_path", "repeat"),
        "verifiers": _dataset("agent_tasks:VerifiersDataset", "taskset", "num_samples"),
        "reasoning_gym": _dataset("generated:ReasoningGymDataset", *_GENERATED, "task", "task_options", "num_shots"),
    },
)
"""The table of datasets: name -> class. A user's own class, package.module.Name, is not in it and accepts any keys."""


def dataset_keys() -> dict[str, tuple[str, ...]]:
    """Return {name of a dataset: its keys in addition to those of `DatasetConfig`}."""
    return {name: entry.keys for name, entry in DATASET_REGISTRY.data.items()}


DATASET_ALIASES = {
    "gsm8k": "GSM8K",
    "aime2024": "AIME2024",
    "aime2025": "AIME2025",
    "aime2026": "AIME2026",
    "openmathinstruct2": "OpenMathInstruct-2",
}
"""Name of a dataset in NeMo RL's guides -> its name in this package."""
QUICK_DATASETS = ("arithmetic", "reverse_digits", "guess_number", "python_functions")
"""The datasets that this package generates within milliseconds."""


def takes(dataset_name: str, key: str) -> bool:
    """Return whether a dataset accepts `key`, which `DatasetConfig` does not have. A user's class accepts any key."""
    return is_dotted(dataset_name) or key in dataset_keys().get(DATASET_ALIASES.get(dataset_name, dataset_name), ())


def defaults_for(section: Mapping[str, object], default: Mapping[str, object]) -> dict[str, object]:
    """Return the part of `default` (data.default) that applies to `section`, an entry of data.train or data.validation:
    the keys of `DatasetConfig`, and those that the entry's dataset accepts."""
    name = section.get("dataset_name", default.get("dataset_name"))
    common = DatasetConfig.model_fields
    return {key: value for key, value in default.items() if key in common or name is None or takes(name, key)}


class DatasetDefaults(Section):
    """The keys that all datasets have. A key that an entry of data.train or data.validation omits has its value in the
    section `data.default`. That section may also contain keys of particular datasets (see `defaults_for`)."""

    model_config = ConfigDict(extra="allow")

    dataset_name: str | None = None
    """Name of the dataset: a built-in one, ResponseDataset (which needs data_path), or your own class as
    package.module.Name. null: data.default.dataset_name."""
    prompt_file: str | None = None
    """Text file with the prompt template. `{}` is replaced by the question. null: the question alone."""
    system_prompt_file: str | None = key(None, "Text file with the system message. null: none.")
    processor: str | None = None
    """Function that turns a row into a sample: a registered name, or your own function as package.module.name. null:
    the default of the dataset."""
    env_name: str | None = key(None, "Name of the environment that scores the responses, a key of `env`.")

    @model_serializer(mode="wrap")
    def _only_what_was_given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        # null and absent differ: `data.default` gives the value of an absent key
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}


def _held_out(value: object) -> float | None:
    if value is None:
        return None
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_count and not (isinstance(value, float) and 0 <= value < 1):
        raise ValueError(f"must be a share from 0 to below 1, or a whole number of samples, not {value!r}")
    return value


HeldOut = Annotated[object, AfterValidator(_held_out)]


class DatasetConfig(DatasetDefaults):
    """Settings of one dataset. Further keys depend on dataset_name."""

    split_validation_size: HeldOut = None
    """Part of the dataset held out for validation: a fraction below 1, or a number of samples. null or 0: none."""
    seed: Int | None = key(None, "Random seed for the validation split and for generated data.")


Datasets = Annotated[
    Annotated[DatasetConfig, Tag("one")] | Annotated[list[DatasetConfig], Tag("many")],
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]


class DataConfig(Section):
    """Datasets for training and validation, and how they are loaded."""

    train: Datasets | None = key(None, "The training dataset, or a list of them.")
    validation: Datasets | None = None
    """The validation dataset, or a list. null: what split_validation_size holds out of the training data, if set."""
    default: DatasetDefaults | None = section(DatasetDefaults)
    max_input_seq_length: Positive | None = None
    """Prompts of this many tokens or more are cut, and their responses are not trained on. null:
    policy.max_total_sequence_length."""
    shuffle: bool = key(True, "Shuffle the training data.")
    num_workers: Int = key(1, "Number of threads that load and prepare samples. 0: the main thread does it.", ge=0)
    use_multiple_dataloader: bool = False
    """Use a data loader for each dataset. They repeat their data without end: set max_num_steps, not max_num_epochs."""
    num_prompts_per_dataloader: Positive | None = None
    """With use_multiple_dataloader: number of prompts that a step takes from one loader. null: all of the step's."""
    custom_dataloader: str | None = None
    """With use_multiple_dataloader: your own function, module.name, that chooses the prompts of a step. It takes
    (data_iterators, dataloaders) and returns (next prompts, data_iterators). It must not keep state, because
    checkpoints do not contain it. null: take from the loaders in turn."""


_FILES = (".csv", ".json", ".jsonl", ".parquet", ".arrow")


class EvalDataConfig(DatasetConfig):
    """The dataset of an evaluation. As in NeMo RL, dataset_name may be a file or a Hub dataset, with `problem_key` and
    `solution_key`: these keys are then read as data_path, input_key and output_key of a ResponseDataset."""

    max_input_seq_length: Positive | None = key(None, "Prompts of this many tokens or more are cut. null: no limit.")
    repeat: Positive = key(1, "Number of times that the dataset is repeated.")

    @model_validator(mode="before")
    @classmethod
    def _from_a_file(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        name = data.get("dataset_name")
        if isinstance(name, str) and ("/" in name or PurePath(name).suffix in _FILES):
            data |= {"dataset_name": "ResponseDataset", "data_path": name}
        name = data.get("dataset_name")
        if isinstance(name, str) and name == "ResponseDataset":
            for theirs, ours in (("problem_key", "input_key"), ("solution_key", "output_key")):
                if theirs in data:
                    data.setdefault(ours, data.pop(theirs))
            data.pop("file_format", None)  # the file's suffix decides
        return data


def too_few_rows(rows: int, batch_size: int, section: str) -> str | None:
    """Return the error message for a data set with fewer rows than a batch, or None if there are enough. `section` is
    the configuration section with the key num_prompts_per_step."""
    if rows >= batch_size:
        return None
    text = f"has {rows} row{'s' if rows != 1 else ''}, fewer than one batch of {batch_size}"
    return f"{text}: lower {section}.num_prompts_per_step (or {section}.batch_multiplier), or take more data"


def other_rows(rows: int, before: int) -> str | None:
    """Return the error message for data of `rows` rows if the checkpoint to resume from was written with `before` rows,
    because the position in the data, which the checkpoint stores, is then wrong. Return None if the numbers are
    equal."""
    return None if rows == before else f"has {rows} rows, not {before}, so this is another run than the checkpoint's"


D = TypeVar("D", DatasetConfig, dict[str, object])


def datasets_of(value: D | list[D] | None, dotted: str) -> list[tuple[str, D]]:
    """Return (dotted key, section) for the section `value` of one dataset, or for each section in the list `value`.
    `dotted` is the key of `value`, such as "data.train"."""
    if isinstance(value, list):
        return [(f"{dotted}.{i}", item) for i, item in enumerate(value)]
    return [] if value is None else [(dotted, value)]


def plain_sections(data: DataConfig | EvalDataConfig | Mapping[str, object]) -> list[tuple[str, dict[str, object]]]:
    """Return (dotted key, section) for each dataset of the section `data` of a run or of an evaluation. The sections
    are dictionaries, and have the values of `data.default` that apply to them."""
    plain = as_written(data)
    if isinstance(data, EvalDataConfig):
        return [("data", plain)]
    default = plain.get("default") or {}
    every = [each for side in ("train", "validation") for each in datasets_of(plain.get(side), f"data.{side}")]
    return [(dotted, {**defaults_for(section, default), **section}) for dotted, section in every]


def environments_of(data: DataConfig, side: str = "data.") -> list[str | None]:
    """Return the name of each dataset's environment, None for a dataset without one. `side` is "data.train" for the
    training datasets alone."""
    return [section.get("env_name") for dotted, section in plain_sections(data) if dotted.startswith(side)]
