"""Data sets as lists of rows, read from local files and folders (JSON, CSV, text, Parquet and Arrow) or from the Hub."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.data import datasets_of
from nemo_rl_cpp.data.conversation import row_at, without_padding
from nemo_rl_cpp.data.interfaces import Indexed, Row
from nemo_rl_cpp.data.random_order import permutation
from nemo_rl_cpp.files.prompt_files import MissingFileError
from nemo_rl_cpp.hub.sources import check_on_hub, unreachable

if TYPE_CHECKING:
    from datasets import Dataset


class ListDataset:
    """A list of rows, indexed by row number. `map` and `select` return a new data set."""

    def __init__(self, rows: Iterable[Mapping[str, object]]):
        self._rows: list[Row] = [dict(row) for row in rows]

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(dict(row) for row in self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])

    def select(self, indices: Iterable[int]) -> ListDataset:
        return ListDataset(self._rows[i] for i in indices)

    def map(
        self, function: Callable[..., Mapping[str, object]], remove_columns: Sequence[str] | None = None, with_indices: bool = False
    ) -> ListDataset:  # fmt: skip
        """Return the rows without `remove_columns`, each updated with `function(row)` or `function(row, index)`."""
        rows = []
        for i, row in enumerate(self._rows):
            added = function(dict(row), i) if with_indices else function(dict(row))
            rows.append({k: v for k, v in row.items() if k not in (remove_columns or ())} | dict(added))
        return ListDataset(rows)

    def train_test_split(self, test_size: float | int, seed: int = 42) -> dict[str, ListDataset]:
        """Return {"train": rows, "test": rows}. `test` has `test_size` rows, or that fraction, rounded up; `seed`
        determines which. Raise ValueError if either part is empty."""
        count = test_size if isinstance(test_size, int) else math.ceil(test_size * len(self))
        if not 0 < count < len(self):
            parts = f"{len(self) - count} rows to train on and {count} to validate with"
            raise ValueError(f"split_validation_size is {test_size}, which leaves {parts}: both must be at least 1")
        order = permutation(len(self), seed, 0)
        return {"train": self.select(order[count:]), "test": self.select(order[:count])}


@dataclass(eq=False)
class ChainedDataset:
    """The concatenation of the data sets `parts`, which may be of different types."""

    parts: Sequence[Indexed[Row]]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> Row:
        left = index + len(self) if index < 0 else index
        for part in self.parts:
            if 0 <= left < len(part):
                return row_at(part, left)
            left -= len(part)
        raise IndexError(f"row {index} of {len(self)}")


_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_LISTED = re.compile(rf"({'|'.join(_SPLITS)})(?=[-_.]|$)")  # a split's name at the start of a file name


def _text(path: Path) -> str:
    """Return the text of a file without byte order mark. Raise ValueError with the byte if it is not UTF-8."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        guess = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "Latin-1 or another old encoding"
        raise ValueError(
            f"data: {path}: byte {error.start} is not UTF-8; the file is {guess}, perhaps: save it as UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"data: {path}: byte {data.index(0)} is zero, which no text holds; the file is UTF-16, perhaps: save it as UTF-8"
        )
    return text


def _json_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the dictionary of a JSON object. Raise ValueError if it has a key twice: json would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _from_json(text: str, where: str) -> object:
    """Return the value of a JSON text. Raise JSONDecodeError if it is none, and ValueError, which begins with `where` (a
    file, and perhaps a line), if it is nested too deeply or has a key twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=_json_object)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: the JSON is nested too deeply") from None


def _json_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON Lines file, or of a JSON file with a list of objects or one object."""
    text = _text(path)
    try:
        whole = _from_json(text, f"data: {path}")
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list):
        rows = whole
    elif isinstance(whole, dict):
        rows = [whole]
    else:
        rows = list(_json_lines(path, text))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"data: {path}, row {number}: is a {type(row).__name__}, expected a JSON object")
    return rows


def _json_lines(path: Path, text: str) -> Iterable[object]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _from_json(line, f"{path}:{number}")
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error


def _csv_rows(path: Path) -> list[Row]:
    csv.field_size_limit(sys.maxsize)  # Python's default is 131,072 characters, which long contexts exceed
    try:
        reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)  # an open quote hides rows
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"data: {path}: line {reader.line_num + 1}: {error}") from None
    names = reader.fieldnames or []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"data: {path}: the header has the column {twice!r} twice")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: the line of row {number} has another number of fields than the header")
    return rows


def _arrow_rows(path: Path) -> list[Row]:
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                try:
                    table = pyarrow.ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    table = pyarrow.ipc.open_file(source).read_all()
        return [without_padding(row) for row in table.to_pylist(maps_as_pydicts="lossy")]
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data: {path}: not a readable {path.suffix} file: {str(error).splitlines()[0]}") from None


def _text_rows(path: Path) -> list[Row]:
    lines = _text(path).replace("\r\n", "\n").split("\n")  # no other character is a line end
    return [{"text": line} for line in (lines if lines[-1] else lines[:-1])]


READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _arrow_rows,
    ".arrow": _arrow_rows,
    ".txt": _text_rows,
}
"""File extension -> reader."""


def read_file(path: Path) -> ListDataset:
    """Return the rows of one file. Raise ValueError if it has no rows."""
    rows = READERS[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"data: the file {str(path)!r} (data_path) holds no rows")
    return ListDataset(rows)


def read_folder(path: Path, split: str | None) -> ListDataset:
    """Return the rows of all data files in a folder and in its subfolder `data`, in the order of their names. If the
    names begin with splits (`train-00000-of-00002.parquet`), read only the files of `split` (None: train). Raise
    ValueError if there is no data file, or files with different extensions."""
    where = f"data: the folder {str(path)!r} (data_path)"
    files = [file for folder in (path, path / "data") if folder.is_dir() for file in sorted(folder.iterdir())]
    files = [file for file in files if file.is_file() and not file.name.startswith(".")]
    files = [file for file in files if file.suffix.lower() in READERS]
    endings = sorted({file.suffix.lower() for file in files})
    if len(endings) > 1:  # .txt and .json may be notes and descriptions of the data
        endings = [ending for ending in endings if ending not in (".txt", ".json")]
    if not files or len(endings) != 1:
        what = f"files with the endings {', '.join(endings)}" if endings else f"no file ending in {', '.join(READERS)}"
        raise ValueError(f"{where} holds {what}, not data files of one kind: name the file to read")
    files = [file for file in files if file.suffix.lower() == endings[0]]
    of_splits = {file: found[1] for file in files if (found := _LISTED.match(file.name))}
    if of_splits:
        wanted, splits = split or "train", sorted(set(of_splits.values()))
        if other := next((file.name for file in files if file not in of_splits), None):
            held = f"files of splits ({', '.join(splits)}) and {other!r}, which belongs to none"
            raise ValueError(f"{where} holds {held}: name the file to read")
        files = [file for file in files if of_splits[file] == wanted]
        if not files:
            raise ValueError(f"{where} has splits {splits}, but split is {wanted!r}")
    elif split not in (None, "train"):
        raise ValueError(f"{where} has only split 'train', but split is {split!r}")
    return ListDataset(row for file in files for row in read_file(file))


def load_dataset_from_path(
    data_path: str, data_subset: str | None = None, data_split: str | None = "train"
) -> ListDataset | Dataset:
    """Load a local file (see `READERS`), a folder of such files or of `datasets.save_to_disk`, or a data set on the
    Hub. Raise ValueError, with the key, if it cannot be loaded, MissingFileError for a missing file."""
    path = Path(os.fspath(data_path)).expanduser()
    if path.suffix.lower() in READERS and not path.is_dir():
        if data_subset is not None:
            raise ValueError(f"data: a local file such as {str(path)!r} has no subsets, but subset is {data_subset!r}")
        if data_split not in (None, "train"):
            raise ValueError(f"data: the file {str(path)!r} has only the split 'train', but split is {data_split!r}")
        if not path.is_file():
            raise MissingFileError(f"data: the file {str(path)!r} (data_path) does not exist")
        return read_file(path)
    if path.is_dir():
        if data_subset is not None:
            if not (path / data_subset).is_dir():
                raise ValueError(f"data: the folder {str(path)!r} has no folder for the subset {data_subset!r}")
            path = path / data_subset
        written = ("dataset_dict.json", "state.json")  # by `datasets.save_to_disk`
        saved = any((path / name).is_file() for name in written)
        return _from_disk(path, data_split) if saved else read_folder(path, data_split)
    if is_local(data_path):
        forms = f"a file ending in {', '.join(READERS)}, a folder of such files, or a data set on the hub"
        raise ValueError(f"data: data_path {str(data_path)!r} must be {forms}")
    return load_hub_dataset(str(data_path), data_subset, data_split)


def is_local(data_path: str) -> bool:
    """Return whether a data_path is a local file or folder, rather than a data set on the Hub."""
    path = Path(os.fspath(data_path)).expanduser()
    return (
        path.suffix.lower() in READERS or path.exists() or path.is_absolute() or str(data_path).startswith((".", "~"))
    )


def _from_disk(path: Path, split: str | None) -> Dataset:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if (split or "train") not in loaded:
        raise ValueError(f"data: {str(path)!r} has the splits {sorted(loaded)}, but split is {split or 'train'!r}")
    return loaded[split or "train"]


def load_hub_dataset(name: str, subset: str | None = None, split: str | None = "train") -> Dataset:
    """Load a data set from the Hugging Face Hub, or from its local cache if the Hub does not answer. Raise SourceError
    (a ValueError) if neither has it."""
    import datasets

    if check_on_hub(name, "dataset", "dataset_name or data_path"):
        return datasets.load_dataset(name, subset, split=split or "train")
    try:
        constants = huggingface_hub.constants
        before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
        # from the cache alone, because the library's online mode would retry for minutes
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(name, subset, split=split or "train")
        finally:
            datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
    except Exception as error:  # noqa: BLE001 - any exception means that it is not cached
        raise unreachable(name, "data set") from error


def merge_datasets(datasets: list[Indexed[Row]]) -> Indexed[Row]:
    """Return one data set with the rows of all `datasets`. The result is a `datasets.Dataset` if all `datasets` are of
    this type and have the same columns, a `ListDataset` if each is a `ListDataset`, and otherwise a
    `ChainedDataset`."""
    if len(datasets) == 1:
        return datasets[0]
    if all(isinstance(dataset, ListDataset) for dataset in datasets):
        return ListDataset(row for dataset in datasets for row in dataset)
    if all(type(dataset).__module__.startswith("datasets.") for dataset in datasets):
        columns = {tuple(sorted(dataset.column_names)) for dataset in datasets}
        if len(columns) == 1:
            return sys.modules["datasets"].concatenate_datasets(datasets)  # imported, as the data sets are its objects
    return ChainedDataset(datasets)


def extract_necessary_env_names(data_config: Mapping[str, object]) -> list[str]:
    """Return the names of all environments that the sections of `data` use, each once, in order of appearance."""
    plain = as_written(data_config)
    every = [each for key in ("train", "validation", "default") for _, each in datasets_of(plain.get(key), key)]
    names = [section.get("env_name") for section in every if section is not None]
    return list(dict.fromkeys(name for name in names if name is not None))
