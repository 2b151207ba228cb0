"""Reading, joining and configuring data sets."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_rl_cpp.data.datasets.list_dataset import ChainedDataset, ListDataset


def assert_no_double_bos(token_ids: Any, tokenizer: Any) -> None:
    """AssertionError if the ids begin with two BOS tokens, as when both template and tokenizer add one."""
    bos = tokenizer.bos_token_id
    if bos is None or len(token_ids) < 2:
        return
    assert not (int(token_ids[0]) == bos and int(token_ids[1]) == bos), (
        "Found double BOS token in the first two positions of the message."
    )


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, or of a JSON file that is a list of objects or an object of columns."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list):
        rows = whole
    elif (
        isinstance(whole, dict)
        and whole
        and all(isinstance(v, list) for v in whole.values())
        and "messages" not in whole
    ):
        return list(ListDataset.from_dict(whole))
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is a {type(row).__name__}, expected a JSON object")
    return rows


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: the line of row {number} has another number of fields than the header")
    return rows


def _arrow_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"reading {path} needs pyarrow: pip install pyarrow, or convert the file to JSONL") from None
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    with pyarrow.memory_map(str(path)) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all().to_pylist()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(source).read_all().to_pylist()


def _text_rows(path: Path) -> list[dict[str, Any]]:
    return [{"text": line} for line in path.read_text(encoding="utf-8").splitlines()]


_READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _arrow_rows,
    ".arrow": _arrow_rows,
    ".txt": _text_rows,
}


def load_dataset_from_path(data_path: str, data_subset: str | None = None, data_split: str | None = "train") -> Any:
    """Rows of a local file (.jsonl, .json, .csv, .txt; .parquet and .arrow with pyarrow), of a folder that
    `datasets.save_to_disk` wrote, or of a data set on the hub.

    A local file has one split, "train". Raises ValueError (FileNotFoundError for a missing file) that names the key.
    """
    path = Path(os.fspath(data_path)).expanduser()
    reader = _READERS.get(path.suffix.lower())
    if reader is not None:
        if data_subset is not None:
            raise ValueError(f"data: a local file such as {str(path)!r} has no subsets, but subset is {data_subset!r}")
        if data_split not in (None, "train"):
            raise ValueError(
                f"data: a local file such as {str(path)!r} has only the split 'train', but split is {data_split!r}"
            )
        if not path.is_file():
            raise FileNotFoundError(f"data: the file {str(path)!r} (data_path) does not exist")
        rows = reader(path)
        if not rows:
            raise ValueError(f"data: the file {str(path)!r} (data_path) holds no rows")
        return ListDataset(rows)
    if path.is_dir():
        return _from_disk(path, data_split)
    if path.exists() or path.is_absolute() or str(data_path).startswith((".", "~")):
        raise ValueError(
            f"data: data_path {str(data_path)!r} must be a file ending in {', '.join(_READERS)}, a folder written by "
            "datasets.save_to_disk, or the name of a data set on the hub"
        )
    return load_hub_dataset(str(data_path), data_subset, data_split)


def _from_disk(path: Path, split: str | None) -> Any:
    datasets = _datasets_library(str(path))
    loaded = datasets.load_from_disk(str(path))
    return loaded[split] if split and isinstance(loaded, datasets.DatasetDict) else loaded


def _datasets_library(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"the data set {what!r} (data.train.dataset_name, data_path) needs the `datasets` library: "
            "pip install datasets, or use ResponseDataset on a local JSONL file"
        ) from None
    return datasets


def load_hub_dataset(name: str, subset: str | None = None, split: str | None = "train") -> Any:
    """A data set of the hub (HF_HOME, HF_DATASETS_CACHE, HF_TOKEN and HF_ENDPOINT count), or of the local cache when
    the hub does not answer. SourceError (a ValueError) of one sentence when it is in neither."""
    from nemo_rl_cpp.models.sources import check_on_hub, unreachable

    reachable = check_on_hub(name, "dataset", "data.train.dataset_name or data_path")
    if reachable:
        datasets = _datasets_library(name)
        return datasets.load_dataset(name, subset, split=split or "train")
    try:
        datasets = _datasets_library(name)
        return _from_datasets_cache(datasets, name, subset, split)
    except Exception as error:  # noqa: BLE001 - whatever the library says: it is not cached
        raise unreachable(name, "data set") from error


def _from_datasets_cache(datasets: Any, name: str, subset: str | None, split: str | None) -> Any:
    """Only from the cache: in its online mode the library would try again and again for minutes."""
    import huggingface_hub.constants as constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, subset, split=split or "train")
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def update_single_dataset_config(data_config: dict[str, Any], default_data_config: dict[str, Any]) -> None:
    """Fills the keys that `data_config` lacks, in place; a key that is there keeps its value, null included."""
    for key, value in default_data_config.items():
        data_config.setdefault(key, value)


def merge_datasets(datasets: list[Any]) -> Any:
    """One data set after the other."""
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


def _sections(data_config: Any) -> Iterable[dict[str, Any]]:
    for key in ("train", "validation", "default"):
        section = data_config.get(key)
        if section is None:
            continue
        several = section if isinstance(section, (list, tuple)) else [section]
        yield from (one for one in several if one is not None)


def extract_necessary_env_names(data_config: dict[str, Any]) -> list[str]:
    """Names of all environments that the sections of `data` ask for, each once, in order of appearance."""
    names = [section.get("env_name") for section in _sections(data_config)]
    return list(dict.fromkeys(name for name in names if name is not None))
