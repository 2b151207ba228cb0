"""The data sets, found by the names that configurations use."""

from collections.abc import Mapping
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.data import DATASET_ALIASES, DATASET_REGISTRY, DatasetConfig, DatasetEntry, dataset_keys
from nemo_rl_cpp.config.errors import sentence
from nemo_rl_cpp.data.datasets.files import merge_datasets
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.dotted_names import import_object, is_dotted


def register_dataset(dataset_name: str, cls: type[RawDataset], keys: tuple[str, ...] = ()) -> None:
    """Register the data set class `cls` under a name, with the names of its configuration keys in addition to those that
    all data sets have. Raise ValueError if the name is taken."""
    DATASET_REGISTRY.add(dataset_name, DatasetEntry(cls, keys))


def dataset_class(dataset_name: str) -> type[RawDataset]:
    """Return the data set class with a registered name or dotted path. Raise ValueError if there is none."""
    dataset_name = DATASET_ALIASES.get(dataset_name, dataset_name)
    if dataset_name in DATASET_REGISTRY:
        return DATASET_REGISTRY[dataset_name]
    if is_dotted(dataset_name):
        found = import_object(dataset_name, "data set class")
        if not hasattr(found, "set_processor"):
            raise ValueError(f"data set class {dataset_name!r}: derive it from nemo_rl_cpp.data.datasets.RawDataset")
        return found
    raise ValueError(f"data: dataset_name {dataset_name!r} is unknown; known are {', '.join(DATASET_REGISTRY)}")


def check_types(section: dict[str, object], cls: type[RawDataset]) -> None:
    """Raise ValueError if a key of `section` does not have the type that this package's class `cls` declares."""
    if not cls.__module__.startswith(__name__):
        return
    for constructor in {base.__init__ for base in cls.__mro__[:-1]}:
        kinds = get_type_hints(constructor)
        for key in section.keys() & kinds.keys() - DatasetConfig.model_fields.keys():
            try:
                TypeAdapter(kinds[key]).validate_python(section[key], strict=True)
            except ValidationError as failure:
                raise ValueError(f"data: {key} {sentence(failure.errors()[0], key, DatasetConfig)}") from None


def load_response_dataset(data_config: DatasetConfig | Mapping[str, object]) -> RawDataset:
    """Load the data set of one section of `data.train` or `data.validation`, and set its processor and prompts."""
    config = as_written(data_config)
    cls = dataset_class(config["dataset_name"])
    check_types(config, cls)
    dataset = cls(**config)
    dataset.set_task_spec(config)
    dataset.set_processor()
    return dataset


def load_eval_dataset(data_config: DatasetConfig | Mapping[str, object]) -> RawDataset:
    """Load the data set of an evaluation. `split` defaults to the data set's test or held-out split, if it has one."""
    config = as_written(data_config)
    cls = dataset_class(config["dataset_name"])
    check_types(config, cls)
    name = DATASET_ALIASES.get(config["dataset_name"], config["dataset_name"])
    config.setdefault("repeat", 1)
    repeat = 1 if "repeat" in dataset_keys().get(name, ()) else config.pop("repeat")
    if getattr(cls, "eval_split", None) is not None and config.get("split") is None:
        config["split"] = cls.eval_split
    dataset = cls(**config)
    if repeat > 1:
        dataset.dataset = merge_datasets([dataset.dataset] * repeat)
    dataset.set_task_spec(config)
    dataset.set_processor()
    return dataset
