"""Turns every form of prompts into rows with the key `prompt`. Anything else is refused in one sentence."""

import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_rl_cpp.argument_checks import described, in_a_line, names_of
from nemo_rl_cpp.data.conversation import (
    came_through_pandas,
    comes_from_arrow,
    is_conversation,
    plain,
    prompt_of,
    row_at,
    without_padding,
)
from nemo_rl_cpp.data.datasets.utils import load_dataset_from_path
from nemo_rl_cpp.data.interfaces import Row

FORMS = "give texts, conversations, rows with the key 'prompt', a data frame, a data set, or the path of a data file"
_RESERVED = ("prompts", "completions")
_LIKE_A_FILE = (
    ".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".txt", ".md", ".xml", ".yaml", ".yml", ".toml", ".xls", ".xlsx",
    ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".pkl", ".pickle", ".pt", ".npy", ".npz", ".db", ".sqlite", ".py", ".ipynb",
)  # fmt: skip
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_HUB_NAME = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)+")


class Rows:
    """Stands in grpo_notebook.yaml and ppo_notebook.yaml for the rows that a call is given."""

    def __init__(self, **kwargs: object) -> None:
        raise ValueError(
            "the notebook's configurations have no data of their own: call nemo_rl_cpp.train_grpo(prompts=...), or set data.train"
        )


def rows_of(given: object, name: str) -> list[Row]:
    """Rows with the key `prompt`, each checked. `name` is the argument that messages name.

    A text is one prompt, unless it names a data file, which is read. A mapping of columns, a data frame (pandas, polars,
    pyarrow) and a `datasets.Dataset` are rows. Rows come out as `data.conversation` writes them. Raises ValueError for all else.
    """
    items, source = _items(given, name)
    padded = comes_from_arrow(given) or any(comes_from_arrow(item) or came_through_pandas(item) for item in items)
    rows = [_row(item, i, source) for i, item in enumerate(items)]
    if padded:
        rows = [without_padding(row) for row in rows]
    if not rows:
        raise ValueError(f"{source} is empty: {FORMS}")
    for i, row in enumerate(rows):
        _check_row(row, f"row {i} of {source}", name)
    return rows


def _items(given: object, name: str) -> tuple[list[object], str]:
    """The prompts or rows one by one, and how messages name where they come from."""
    if given is None:
        raise ValueError(f"{name} is missing: {FORMS}")
    if isinstance(given, os.PathLike):
        return _read(os.fspath(given), name)
    if isinstance(given, str):
        return _read(given, name) if _is_path(given, name) else ([given], name)
    if callable(given) and not hasattr(given, "__len__"):
        raise ValueError(
            f"{name} is {described(given)}: {FORMS}; the order of arguments is model, prompts, reward_funcs"
        )
    if isinstance(given, (bool, int, float, complex, bytes, bytearray, set, frozenset)) or callable(given):
        raise ValueError(f"{name} is {described(given)}: {FORMS}")
    if isinstance(given, io.IOBase) or hasattr(given, "readlines"):
        raise ValueError(f"{name} is an open file: give its path, {in_a_line(getattr(given, 'name', 'data.jsonl'))}")
    if isinstance(given, Mapping):
        return _from_mapping(given, name), name
    if hasattr(given, "columns"):
        if hasattr(given, "iloc"):  # pandas, whose missing values are NaN
            return given.astype(object).where(given.notna(), None).to_dict(orient="records"), name
        for method in ("to_dicts", "to_pylist"):  # polars; pyarrow
            if hasattr(given, method):
                return getattr(given, method)(), name
    if (dimensions := getattr(given, "ndim", 1)) != 1:
        raise ValueError(f"{name} is {described(given)} of {dimensions} dimensions: {FORMS}")
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} is {described(given)}: {FORMS}")
    items = list(given)
    return ([items] if is_conversation(items) else items), name


def _is_path(text: str, name: str) -> bool:
    """Whether a text is the path of a file or folder. ValueError where it may be meant so: it ends like a file, is an address,
    or has a line end behind a path."""
    if not text.strip():
        return False
    if text != text.strip() and "\n" not in text.strip() and _is_path(text.strip(), name):
        raise ValueError(
            f"{name} is {in_a_line(text)}, a path with spaces or line ends around it: take them off, or, if it is a prompt, write [{in_a_line(text)}]"
        )
    try:
        path = Path(text).expanduser()
        there = path.exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a zero byte, no such user
        return False
    if there:
        return True
    if path.suffix.lower() in _LIKE_A_FILE and "\n" not in text:
        raise ValueError(f"{name} names the file {text}, which does not exist (if it is a prompt, write [{text!r}])")
    if _URI.fullmatch(text):
        raise ValueError(
            f"{name} is the address {text}: give the path of a file on this machine, or, if it is a prompt, [{text!r}]"
        )
    if _HUB_NAME.fullmatch(text):
        raise ValueError(
            f"{name} is {text!r}, which looks like a path or the name of a data set: give the rows (datasets.load_dataset({text!r}, split=...)), "
            f"or, if it is a prompt, [{text!r}]"
        )
    return False


def _read(path: str, name: str) -> tuple[list[object], str]:
    try:
        found = load_dataset_from_path(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{name} is the path {in_a_line(path, 200)} (if it is a prompt, give it in a list), which cannot be read: {' '.join(str(error).split())}"
        ) from None
    rows = [row_at(found, i) for i in range(len(found))]
    if path.lower().endswith(".txt"):  # its lines are the prompts
        rows = [{"prompt": row["text"]} if set(row) == {"text"} else row for row in rows]
    return rows, f"{name} ({path})"


def _from_mapping(given: Mapping[str, object], name: str) -> list[object]:
    parts = [
        key
        for key, value in given.items()
        if hasattr(value, "column_names") or hasattr(value, "iloc") and hasattr(value, "columns")
    ]
    if parts:
        raise ValueError(
            f"{name} is a {type(given).__name__} of data sets: give one of them, {name}[{in_a_line(parts[0])}]"
        )
    if "prompt" not in given:
        raise ValueError(f"{name} is a mapping without the key 'prompt', it has {names_of(given)}: {FORMS}")
    if isinstance(given["prompt"], str) or is_conversation(plain(given["prompt"])):
        return [given]  # one row
    wrong = next(
        (
            key
            for key, value in given.items()
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
        ),
        None,
    )
    if wrong is not None:
        raise ValueError(
            f"{name} is a mapping of columns, whose column {in_a_line(wrong)} is {described(given[wrong])}: each must be a list, one value a row"
        )
    columns = {key: list(value) for key, value in given.items()}
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{name} is a mapping of columns of different lengths: {', '.join(f'{in_a_line(k)} has {n}' for k, n in lengths.items())}"
        )
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _row(item: object, index: int, source: str) -> Row:
    if hasattr(item, "_asdict"):  # of DataFrame.itertuples
        found = plain(item._asdict())
    elif hasattr(item, "iloc") and all(isinstance(key, str) for key in item.index):  # of DataFrame.iterrows
        found = plain(item.to_dict())
    else:
        found = plain(item)
    if isinstance(found, dict):
        return found
    if isinstance(found, str) or is_conversation(found):
        return {"prompt": found}
    shown = item if isinstance(item, tuple) else found
    shape = f" of {len(shown)}" if isinstance(shown, (list, tuple)) else ""
    raise ValueError(
        f"row {index} of {source} is {described(shown)}{shape}; a row is a text, a conversation (a list of messages with role and content), "
        'or a mapping such as {"prompt": "1+1=", "answer": "2"}'
    )


def _check_row(row: Row, where: str, name: str) -> None:
    wrong = next((key for key in row if not isinstance(key, str)), None)
    if wrong is not None:
        raise ValueError(f"{where} has the key {in_a_line(wrong)}; keys must be texts")
    if "prompt" not in row:
        raise ValueError(f"{where} has no key 'prompt', it has {names_of(row)}")
    taken = next((key for key in _RESERVED if key in row), None)
    if taken is not None:
        raise ValueError(
            f"{where} has the key {taken!r}, under which reward functions are given something else: rename it"
        )
    prompt_of(row["prompt"], where)
