"""The data sets of a run and the environments that score them, made from the sections `data` and `env`."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.data import DataConfig, defaults_for
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, RawDataset, load_response_dataset, merge_datasets
from nemo_rl_cpp.data.datasets.files import extract_necessary_env_names, sections_of
from nemo_rl_cpp.data.datasets.response_datasets import check_dataset_config
from nemo_rl_cpp.data.interfaces import Indexed, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.interfaces import TaskDataPreProcessFnCallable as Preprocessor
from nemo_rl_cpp.data.interfaces import TaskDataProcessFnCallable as Processor
from nemo_rl_cpp.environments.inspection import Limits, inspect_rows, say
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.remote import ActorSettings, shut_down

Settings = dict[str, object]  # a section of a configuration as plain data
Datasets = AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]


class _Tasks:
    """The rows, processors and environments of training or of validation, by task name."""

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
            merge_datasets(rows), tokenizer, None, self.processors, self.preprocessors, max_seq_length
        )


def _filled_sections(config: Settings, env_configs: Settings | None) -> dict[str, list[Settings]]:
    """Return the sections of training and validation with defaults filled in. Raise ValueError for mistakes that can be
    found before data is loaded.
    """
    if config.get("train") is None:
        raise ValueError(
            "the data section lacks `train`: data.train.dataset_name names the training data, and "
            "data.validation that for validation"
        )
    default = config.get("default") or {}
    sides: dict[str, list[Settings]] = {}
    for side in ("train", "validation"):
        sides[side] = [{**defaults_for(section, default), **section} for section in sections_of(config.get(side))]
        for section in sides[side]:
            check_dataset_config(section)
            env_name = section.get("env_name")
            if env_configs is not None and env_name is None:
                raise ValueError(
                    f"data.{side} lacks env_name (data.default.env_name serves all): which environment scores it?"
                )
            if env_configs is not None and env_configs.get(env_name) is None:
                raise ValueError(f"data.{side}.env_name is {env_name!r}, but there is no section env.{env_name}")
    return sides


@dataclass(frozen=True)
class ResponseData:
    """The data sets of a run and their environments.

    Attributes:
        train: one data set, or with `data.use_multiple_dataloader` one per task name.
        validation: one data set of all rows that split_validation_size holds out and all rows in `data.validation`.
        environments: the environments of training, by task name; empty without `env_configs`.
        val_environments: the environments of validation, by task name.
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
    """Load the data sets of a run. With `env_configs`, also make each environment that a section refers to; with
    `actors`, make them in Ray actors.

    Warn of prompts that will be truncated (`data.max_input_seq_length`) or that reach `max_total_sequence_length`, and
    of ground truths that no response can match. Raise ValueError if one of these problems affects all rows of a
    section.
    """
    config = as_written(data_config)
    sides = _filled_sections(config, env_configs)
    max_length = as_model(config, DataConfig, "data").max_input_seq_length
    limits = Limits(max_length, max_total_sequence_length)
    environments: dict[str, Environment] = {}
    try:
        # environments start processes, which is safe only before threads exist
        for name in extract_necessary_env_names(config) if env_configs is not None else ():
            if env_configs.get(name) is not None:  # a default that no section uses may have no entry
                environments[name] = create_env(name, env_configs[name], actors)
        tasks = {"train": _Tasks(), "validation": _Tasks()}
        for side, sections in sides.items():
            for i, section in enumerate(sections):
                raw = load_response_dataset(section)
                env_name = section.get("env_name")
                where = f"data.{side}.{i}" if isinstance(config[side], (list, tuple)) else f"data.{side}"
                scored = (env_name, (env_configs or {}).get(env_name))
                parts = [(side, where, raw.dataset)]
                if side == "train" and raw.val_dataset is not None:
                    parts.append(("validation", f"{where} (held out)", raw.val_dataset))
                for part_of, place, rows in parts:
                    tasks[part_of].add(raw, rows, environments.get(env_name))
                    say(inspect_rows(raw, rows, tokenizer, limits, place, scored))
    except BaseException:
        for environment in environments.values():
            shut_down(environment)
        raise
    train, val = tasks["train"], tasks["validation"]
    train_rows, val_rows = ([rows for each in side.datasets.values() for rows in each] for side in (train, val))
    dataset: Datasets = (
        {name: train.processed(rows, tokenizer, max_length) for name, rows in train.datasets.items()}
        if config.get("use_multiple_dataloader")
        else train.processed(train_rows, tokenizer, max_length)
    )
    val_dataset = val.processed(val_rows, tokenizer, max_length) if val_rows else None
    return ResponseData(dataset, val_dataset, train.environments, val.environments)
