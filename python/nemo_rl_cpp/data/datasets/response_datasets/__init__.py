"""The data sets, found by the names that configurations use."""

from collections.abc import Mapping
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from nemo_rl_cpp.argument_checks import did_you_mean
from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.data import DATASET_ALIASES, DATASET_REGISTRY, DatasetConfig, DatasetEntry, dataset_keys, takes
from nemo_rl_cpp.config.errors import sentence
from nemo_rl_cpp.data.datasets.files import merge_datasets
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.dotted_names import import_object, is_dotted

_OF_THE_EVAL_SECTION = frozenset({"max_input_seq_length", "shuffle", "num_workers", "repeat"})


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
    known = f"known are {', '.join(DATASET_REGISTRY)}; ResponseDataset reads a local file or a data set of the hub"
    raise ValueError(
        f"data: dataset_name {dataset_name!r} is unknown; {did_you_mean(dataset_name, DATASET_REGISTRY, known)}"
    )


def check_dataset_config(data_config: dict[str, object], further: frozenset[str] = frozenset()) -> type[RawDataset]:
    """Return the class that `dataset_name` selects. Raise ValueError for a key that is neither common to all data sets,
    nor of this class, nor in `further`. The keys of a custom class are not checked."""
    if "dataset_name" not in data_config:
        raise ValueError("data: the section lacks dataset_name (a known name, ResponseDataset, or a dotted class path)")
    name = str(data_config["dataset_name"])
    cls = dataset_class(name)
    known = {*DatasetConfig.model_fields, *further, *_keys_of(name)}
    if (key := next((key for key in data_config if key not in known), None)) is not None and not takes(name, key):
        hint = did_you_mean(key, known, f"known are {', '.join(sorted(known))}")
        raise ValueError(f"data: {key} is unknown for dataset_name {name}; {hint}")
    check_types(data_config, cls)
    return cls


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


def _keys_of(name: str) -> tuple[str, ...]:
    return dataset_keys().get(DATASET_ALIASES.get(name, name), ())


def load_response_dataset(data_config: DatasetConfig | Mapping[str, object]) -> RawDataset:
    """Load the data set of one section of `data.train` or `data.validation`, and set its processor and prompts."""
    config = as_written(data_config)
    dataset = check_dataset_config(config)(**config)
    dataset.set_task_spec(config)
    dataset.set_processor()
    return dataset


def load_eval_dataset(data_config: DatasetConfig | Mapping[str, object]) -> RawDataset:
    """Load the data set of an evaluation. `split` defaults to the data set's test or held-out split, if it has one."""
    config = as_written(data_config)
    cls = check_dataset_config(config, _OF_THE_EVAL_SECTION)
    repeat = 1 if "repeat" in _keys_of(str(config["dataset_name"])) else config.pop("repeat", 1)
    if getattr(cls, "eval_split", None) is not None and config.get("split") is None:
        config["split"] = cls.eval_split
    dataset = cls(**config)
    if repeat > 1:
        dataset.dataset = merge_datasets([dataset.dataset] * repeat)
    dataset.set_task_spec(config)
    dataset.set_processor()
    return dataset
