"""Rows of local files and folders: JSON, CSV, text, Parquet and Arrow."""

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.datasets.list_dataset import ListDataset
from nemo_rl_cpp.data.interfaces import Row
from nemo_rl_cpp.data.plain_rows import without_padding

if TYPE_CHECKING:
    import pyarrow

_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_LISTED = re.compile(rf"({'|'.join(_SPLITS)})(?=[-_.]|$)")  # a split's name at the beginning of a file's


def _text(path: Path) -> str:
    """A text file without byte order mark; ValueError with the file and the byte when it is not UTF-8."""
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


def _json_rows(path: Path) -> list[Row]:
    """Rows of a JSON Lines file, or of a JSON file that is a list of objects or an object of columns."""
    text = _text(path)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    except RecursionError:
        raise ValueError(f"data: {path}: the JSON is nested too deeply") from None
    if isinstance(whole, list):
        rows = whole
    elif path.suffix.lower() == ".json" and _are_columns(whole):
        try:
            return list(ListDataset.from_dict(whole))
        except ValueError as error:
            raise ValueError(f"data: {path}: {error}") from None
    elif isinstance(whole, dict):
        rows = [whole]
    else:
        rows = list(_json_lines(path, text))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"data: {path}, row {number}: is a {type(row).__name__}, expected a JSON object")
    return rows


def _are_columns(whole: object) -> bool:
    """Whether a JSON object holds columns of values; a conversation inside makes it a row."""
    return (
        isinstance(whole, dict)
        and bool(whole)
        and all(
            isinstance(values, list)
            and not (values and isinstance(values[0], dict) and {"role", "from"} & values[0].keys())
            for values in whole.values()
        )
    )


def _json_lines(path: Path, text: str) -> Iterable[object]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object: {error}") from error
            except RecursionError:
                raise ValueError(f"{path}:{number}: the JSON is nested too deeply") from None


def _csv_rows(path: Path) -> list[Row]:
    try:
        reader = csv.DictReader(io.StringIO(_text(path), newline=""))
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"data: {path}: line {reader.line_num}: {error}") from None
    names = reader.fieldnames or []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"data: {path}: the header has the column {twice!r} twice")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: the line of row {number} has another number of fields than the header")
    return rows


def _arrow_rows(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"reading {path} needs pyarrow: pip install pyarrow, or convert the file to JSONL") from None
    try:
        return [without_padding(row) for row in _arrow_table(path).to_pylist(maps_as_pydicts="lossy")]
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data: {path}: not a readable {path.suffix} file: {str(error).splitlines()[0]}") from None


def _arrow_table(path: Path) -> "pyarrow.Table":
    import pyarrow

    if path.suffix.lower() == ".parquet":
        return pyarrow.parquet.read_table(path)
    with pyarrow.memory_map(str(path)) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(source).read_all()


def _text_rows(path: Path) -> list[Row]:
    lines = _text(path).replace("\r\n", "\n").split("\n")  # no other character ends a line
    return [{"text": line} for line in (lines if lines[-1] else lines[:-1])]


READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _arrow_rows,
    ".arrow": _arrow_rows,
    ".txt": _text_rows,
}
"""Reader by the ending of a file."""


def read_file(path: Path) -> ListDataset:
    """The rows of one file. ValueError when it holds none."""
    rows = READERS[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"data: the file {str(path)!r} (data_path) holds no rows")
    return ListDataset(rows)


def read_folder(path: Path, split: str | None) -> ListDataset:
    """The rows of all data files of a folder (or of its folder `data`), in the order of their names.

    All must have one ending. Where names begin with a split's name (`train-00000-of-00002.parquet`), those of `split`
    are read. ValueError when nothing fits.
    """
    files = [file for folder in (path, path / "data") if folder.is_dir() for file in sorted(folder.iterdir())]
    files = [
        file for file in files if file.is_file() and file.suffix.lower() in READERS and not file.name.startswith(".")
    ]
    endings = sorted({file.suffix.lower() for file in files})
    if len(endings) > 1:  # notes and descriptions beside the data
        endings = [ending for ending in endings if ending not in (".txt", ".json")]
    if not files or len(endings) != 1:
        what = f"files with the endings {', '.join(endings)}" if endings else f"no file ending in {', '.join(READERS)}"
        raise ValueError(
            f"data: the folder {str(path)!r} (data_path) holds {what}; expected files of one kind, or what "
            "datasets.save_to_disk wrote: name the file to read"
        )
    files = [file for file in files if file.suffix.lower() == endings[0]]
    of_splits = {file: found[1] for file in files if (found := _LISTED.match(file.name))}
    if of_splits:
        wanted = split or "train"
        others = [file.name for file in files if file not in of_splits]
        if others:
            raise ValueError(
                f"data: the folder {str(path)!r} (data_path) holds files of splits ({', '.join(sorted(set(of_splits.values())))}) and "
                f"{others[0]!r}, which belongs to none: name the file to read"
            )
        files = [file for file in files if of_splits[file] == wanted]
        if not files:
            raise ValueError(
                f"data: the folder {str(path)!r} (data_path) holds the splits {sorted(set(of_splits.values()))}, "
                f"but split is {wanted!r}"
            )
    elif split not in (None, "train"):
        raise ValueError(
            f"data: the folder {str(path)!r} (data_path) has only the split 'train', but split is {split!r}"
        )
    return ListDataset(row for file in files for row in read_file(file))
