"""From the `data` and `env` sections of a configuration to data sets and environments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.data import DataConfig, defaults_for
from nemo_rl_cpp.data.datasets import (
    AllTaskProcessedDataset,
    RawDataset,
    extract_necessary_env_names,
    load_response_dataset,
    merge_datasets,
    update_single_dataset_config,
)
from nemo_rl_cpp.data.datasets.response_datasets import check_dataset_config
from nemo_rl_cpp.data.datasets.utils import sections_of
from nemo_rl_cpp.data.inspection import Limits, inspect_rows, say
from nemo_rl_cpp.data.interfaces import Indexed, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.interfaces import TaskDataPreProcessFnCallable as Preprocessor
from nemo_rl_cpp.data.interfaces import TaskDataProcessFnCallable as Processor

if TYPE_CHECKING:
    from nemo_rl_cpp.environments.interfaces import Environment
    from nemo_rl_cpp.environments.remote import ActorSettings

    Settings = dict[str, object]  # a section of a configuration as plain data
    Datasets = AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]


class Resumable(Protocol):
    """A loader whose position can be kept: `StatefulDataLoader`, one of several tasks, or one of another package."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


def get_train_dataset_name(data_config: DataConfig | Settings | None) -> str | None:
    """`dataset_name` of the training data, of the first of several; None without any."""
    config = as_written(data_config or {})
    sections, default = sections_of(config.get("train")), (config.get("default") or {}).get("dataset_name")
    return (sections[0].get("dataset_name") or default) if sections else None


class _Tasks:
    """What the loaded data sets of one side (training or validation) bind to their task names."""

    def __init__(self) -> None:
        self.datasets: dict[str, list[Indexed[Row]]] = {}
        self.processors: dict[str, tuple[TaskDataSpec, Processor]] = {}
        self.preprocessors: dict[str, Preprocessor] = {}
        self.environments: dict[str, Environment] = {}

    def add(self, raw: RawDataset, rows: Indexed[Row], environment: Environment | None) -> None:
        name = raw.task_name
        spec, processor = self.processors.get(name, (raw.task_spec, raw.processor))
        own = raw.task_spec
        if (spec.prompt, spec.system_prompt, processor) != (own.prompt, own.system_prompt, raw.processor):
            raise ValueError(
                f"data: two sections have the task name {name!r} but different prompts or processors: give their "
                "files different names, since a row finds its processor by its task name"
            )
        self.datasets.setdefault(name, []).append(rows)
        self.processors[name] = (raw.task_spec, raw.processor)
        if getattr(raw, "preprocessor", None) is not None:
            self.preprocessors[name] = raw.preprocessor
        if environment is not None:
            self.environments[name] = environment

    def processed(
        self, rows: list[Indexed[Row]], tokenizer: TokenizerType, max_seq_length: int | None
    ) -> AllTaskProcessedDataset:
        return AllTaskProcessedDataset(
            merge_datasets(rows),
            tokenizer,
            None,
            self.processors,
            task_data_preprocessors=self.preprocessors,
            max_seq_length=max_seq_length,
        )


def _check_and_fill(config: Settings, env_configs: Settings | None) -> tuple[list[Settings], list[Settings]]:
    """The sections of both sides with the defaults filled in, everything checked that can be before loading."""
    if config.get("train") is None:
        raise ValueError(
            "the data section lacks `train`: data.train.dataset_name names the training data, and "
            "data.validation that for validation"
        )
    default = config.get("default") or {}
    sides = sections_of(config["train"]), sections_of(config.get("validation"))
    for side, sections in zip(("train", "validation"), sides):
        for section in sections:
            update_single_dataset_config(section, defaults_for(section, default))
            check_dataset_config(section)
            if env_configs is None:
                continue
            env_name = section.get("env_name")
            if env_name is None:
                raise ValueError(
                    f"data.{side} lacks env_name (data.default.env_name serves all): which environment scores it?"
                )
            if env_configs.get(env_name) is None:
                raise ValueError(f"data.{side}.env_name is {env_name!r}, but there is no section env.{env_name}")
    return sides


@dataclass(frozen=True)
class ResponseData:
    """The data sets of a run and their environments.

    Attributes:
        train: one data set, or with `data.use_multiple_dataloader` one for each task name.
        validation: one data set over everything held out by split_validation_size and everything in `data.validation`.
        environments: by task name, those that score training; empty where none were asked for.
        val_environments: the same for validation.
    """

    train: Datasets
    validation: AllTaskProcessedDataset | None
    environments: dict[str, Environment]
    val_environments: dict[str, Environment]


def load_response_data(
    tokenizer: TokenizerType,
    data_config: DataConfig | Settings,
    env_configs: Settings | None = None,
    max_total_sequence_length: int | None = None,
    actors: ActorSettings | None = None,
) -> ResponseData:
    """The data sets of a run, and with `env_configs` its environments, created once for each env_name that a section uses.
    The configuration is left as it is.

    Prompts that are cut (`data.max_input_seq_length`), that fill `max_total_sequence_length`, and truths that nothing can
    match are counted and said on stderr; ValueError when they are all the rows of a section. With `actors` environments are
    Ray actors.
    """
    config = as_written(data_config)
    train_sections, val_sections = _check_and_fill(config, env_configs)
    max_length = as_model(config, DataConfig, "data").max_input_seq_length
    # Environments start processes, which is safe only before threads exist.
    environments = {} if env_configs is None else _create_environments(config, env_configs, actors)
    try:
        train, val = _Tasks(), _Tasks()
        limits = Limits(max_length, context=max_total_sequence_length)
        for side, tasks, sections in (("train", train, train_sections), ("validation", val, val_sections)):
            for i, section in enumerate(sections):
                raw = load_response_dataset(section)
                env_name = section.get("env_name")
                environment = environments.get(env_name)
                where = f"data.{side}.{i}" if isinstance(config[side], (list, tuple)) else f"data.{side}"
                scored = (env_name, None if env_configs is None else env_configs.get(env_name))
                tasks.add(raw, raw.dataset, environment)
                say(inspect_rows(raw, raw.dataset, tokenizer, limits, where, scored))
                if side == "train" and raw.val_dataset is not None:
                    val.add(raw, raw.val_dataset, environment)
                    say(inspect_rows(raw, raw.val_dataset, tokenizer, limits, f"{where} (held out)", scored))
        train_rows, val_rows = (
            [rows for several in side.datasets.values() for rows in several] for side in (train, val)
        )
        dataset: Datasets = (
            {name: train.processed(rows, tokenizer, max_length) for name, rows in train.datasets.items()}
            if config.get("use_multiple_dataloader")
            else train.processed(train_rows, tokenizer, max_length)
        )
        val_dataset = val.processed(val_rows, tokenizer, max_length) if val_rows else None
    except BaseException:
        _shut_down(environments)
        raise
    return ResponseData(dataset, val_dataset, train.environments, val.environments)


def _create_environments(
    config: Settings, env_configs: Settings, actors: ActorSettings | None
) -> dict[str, Environment]:
    from nemo_rl_cpp.environments.loading import create_env

    placed = {} if actors is None else {"actors": actors}
    created: dict[str, Environment] = {}
    try:
        for name in extract_necessary_env_names(config):
            if env_configs.get(name) is not None:  # a default that no section uses may lack one
                created[name] = create_env(env_name=name, env_config=env_configs[name], **placed)
    except BaseException:
        _shut_down(created)
        raise
    return created


def _shut_down(environments: Mapping[str, Environment]) -> None:
    from nemo_rl_cpp.environments.loading import shut_down

    for environment in environments.values():
        shut_down(environment)


def dataloader_state_file(checkpoint_path: str | Path, suffix: str = "") -> Path:
    """Where a checkpoint keeps the position in the data."""
    return Path(checkpoint_path) / f"train_dataloader{suffix}.json"


def save_dataloader_state(dataloader: Resumable, checkpoint_path: str | Path, suffix: str = "") -> None:
    """Writes the loader's position beside a checkpoint."""
    file = dataloader_state_file(checkpoint_path, suffix)
    file.write_text(json.dumps(dataloader.state_dict(), indent=2) + "\n", encoding="utf-8")


def load_dataloader_state(
    dataloader: Resumable, checkpoint_path: str, data_config: DataConfig | Settings, suffix: str = ""
) -> None:
    """Takes the loader to the position that a checkpoint keeps.

    When the configuration saved beside it (config.yaml) names another training data set, the loader stays where it is, at
    the beginning of the new one, and a message says so. A position that torch saved (train_dataloader{suffix}.pt, for
    loaders of other packages) is read where there is none of ours. FileNotFoundError when the checkpoint has none;
    ValueError when it belongs to other rows, another seed or another order.
    """
    file = dataloader_state_file(checkpoint_path, suffix)
    foreign = file.with_suffix(".pt")
    if not file.is_file() and not foreign.is_file():
        raise FileNotFoundError(
            f"the checkpoint {checkpoint_path} holds no position in the data ({file.name}), so the run on "
            f"{get_train_dataset_name(data_config)} cannot be resumed from it"
        )
    before, now = _saved_dataset_name(Path(checkpoint_path)), get_train_dataset_name(data_config)
    if None not in (before, now) and before != now:
        print(
            f"Dataset swap detected: the checkpoint was trained on {before!r}, this run on {now!r}, which begins at its start"
        )
    elif file.is_file():
        dataloader.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
    else:
        import torch

        dataloader.load_state_dict(torch.load(foreign, weights_only=True))


def _saved_dataset_name(checkpoint: Path) -> str | None:
    from nemo_rl_cpp.checks.resumed import read_saved

    saved = read_saved(checkpoint).config
    name = get_train_dataset_name(saved.get("data")) if saved is not None else None
    return None if name is None or "${" in name else name  # a name from the environment is not written down
