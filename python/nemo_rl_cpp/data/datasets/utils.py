"""Functions that load, concatenate and configure data sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.datasets.files import READERS, ChainedDataset, ListDataset, read_file, read_folder
from nemo_rl_cpp.data.interfaces import Indexed, Row, TokenizerType
from nemo_rl_cpp.files.prompt_files import MissingFileError
from nemo_rl_cpp.hub.sources import check_on_hub, unreachable

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

    Section = dict[str, object]  # one data set of a configuration, as plain data


def assert_no_double_bos(token_ids: Sequence[int] | torch.Tensor, tokenizer: TokenizerType) -> None:
    """Raise AssertionError if the ids begin with two BOS tokens, for instance one from the template and one from the
    tokenizer.
    """
    bos = tokenizer.bos_token_id
    if bos is None or len(token_ids) < 2:
        return
    assert not (int(token_ids[0]) == bos and int(token_ids[1]) == bos), (
        "Found double BOS token in the first two positions of the message."
    )


def load_dataset_from_path(
    data_path: str, data_subset: str | None = None, data_split: str | None = "train"
) -> ListDataset | Dataset:
    """Load a local file (.jsonl, .json, .csv, .txt; with pyarrow also .parquet and .arrow), a folder of such files, a
    folder written by `datasets.save_to_disk`, or a data set on the Hub.

    A local file has the single split "train". Raise ValueError with the configuration key. For a missing file it is a
    MissingFileError.
    """
    path = Path(os.fspath(data_path)).expanduser()
    if path.suffix.lower() in READERS and not path.is_dir():
        if data_subset is not None:
            raise ValueError(f"data: a local file such as {str(path)!r} has no subsets, but subset is {data_subset!r}")
        if data_split not in (None, "train"):
            raise ValueError(
                f"data: a local file such as {str(path)!r} has only the split 'train', but split is {data_split!r}"
            )
        if not path.is_file():
            raise MissingFileError(f"data: the file {str(path)!r} (data_path) does not exist")
        return read_file(path)
    if path.is_dir():
        if data_subset is not None:
            if not (path / data_subset).is_dir():
                raise ValueError(f"data: the folder {str(path)!r} has no folder for the subset {data_subset!r}")
            path = path / data_subset
        saved = any(
            (path / name).is_file() for name in ("dataset_dict.json", "state.json")
        )  # written by `datasets.save_to_disk`
        return _from_disk(path, data_split) if saved else read_folder(path, data_split)
    if is_local(data_path):
        raise ValueError(
            f"data: data_path {str(data_path)!r} must be a file ending in {', '.join(READERS)}, a folder of such files or "
            "one written by datasets.save_to_disk, or the name of a data set on the hub"
        )
    return load_hub_dataset(str(data_path), data_subset, data_split)


def is_local(data_path: str) -> bool:
    """Return whether a data_path is a local file or folder, rather than a data set on the Hub."""
    path = Path(os.fspath(data_path)).expanduser()
    return (
        path.suffix.lower() in READERS or path.exists() or path.is_absolute() or str(data_path).startswith((".", "~"))
    )


def _from_disk(path: Path, split: str | None) -> Dataset:
    datasets = _datasets_library(str(path))
    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if (split or "train") not in loaded:
        raise ValueError(
            f"data: {str(path)!r} (data_path) has the splits {sorted(loaded)}, but split is {split or 'train'!r}"
        )
    return loaded[split or "train"]


def _datasets_library(what: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"the data set {what!r} (dataset_name, data_path) needs the `datasets` library: "
            "pip install datasets, or use ResponseDataset on a local JSONL file"
        ) from None
    return datasets


def load_hub_dataset(name: str, subset: str | None = None, split: str | None = "train") -> Dataset:
    """Load a data set from the Hub, or from the local cache if the Hub is unreachable. The environment variables
    HF_HOME, HF_DATASETS_CACHE, HF_TOKEN and HF_ENDPOINT apply. Raise SourceError (a ValueError) if neither has the data
    set.
    """
    reachable = check_on_hub(name, "dataset", "dataset_name or data_path")
    if reachable:
        datasets = _datasets_library(name)
        return datasets.load_dataset(name, subset, split=split or "train")
    try:
        datasets = _datasets_library(name)
        return _from_datasets_cache(datasets, name, subset, split)
    except Exception as error:  # noqa: BLE001 - any exception means that it is not cached
        raise unreachable(name, "data set") from error


def _from_datasets_cache(datasets: ModuleType, name: str, subset: str | None, split: str | None) -> Dataset:
    """Load a data set from the cache alone, because the library's online mode would retry for minutes."""
    import huggingface_hub.constants as constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, subset, split=split or "train")
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def merge_datasets(datasets: list[Indexed[Row]]) -> Indexed[Row]:
    """Return the concatenation of data sets."""
    if len(datasets) == 1:
        return datasets[0]
    if all(isinstance(dataset, ListDataset) for dataset in datasets):
        return ListDataset(row for dataset in datasets for row in dataset)
    if all(type(dataset).__module__.startswith("datasets.") for dataset in datasets):
        columns = {tuple(sorted(dataset.column_names)) for dataset in datasets}
        if len(columns) == 1:
            from datasets import concatenate_datasets

            return concatenate_datasets(datasets)
    return ChainedDataset(datasets)


def sections_of(side: Section | Sequence[Section] | None) -> list[Section]:
    """Return the data sets in `data.train` or `data.validation` as a list. The value may be a section, a list of
    sections, or None.
    """
    return [] if side is None else list(side) if isinstance(side, (list, tuple)) else [side]


def extract_necessary_env_names(data_config: Mapping[str, object]) -> list[str]:
    """Return the names of all environments that the sections of `data` use, each once, in order of appearance."""
    sides = [sections_of(data_config.get(key)) for key in ("train", "validation", "default")]
    names = [section.get("env_name") for side in sides for section in side if section is not None]
    return list(dict.fromkeys(name for name in names if name is not None))
