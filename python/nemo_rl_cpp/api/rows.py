"""Converts prompts in any supported form to rows with the key `prompt`, and rows to a tokenized, length-checked data
set."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_rl_cpp.argument_checks import described, in_a_line, is_iterable, names_of
from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.chat_template import render_prompt
from nemo_rl_cpp.data.conversation import (
    came_through_pandas,
    comes_from_arrow,
    is_conversation,
    plain,
    prompt_of,
    row_at,
    tools_of,
    without_padding,
)
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset
from nemo_rl_cpp.data.datasets.files import load_dataset_from_path
from nemo_rl_cpp.data.interfaces import DatumSpec, Message, Row, TaskDataSpec, TokenizerType

FORMS = "give texts, conversations, rows with the key 'prompt', a data frame, a data set, or the path of a data file"
TASK = "notebook"
Prompt = str | Sequence[Mapping[str, object]]
_DATA_FILES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_RESERVED = ("prompts", "completions")


# ---- from arguments to rows


def rows_of(given: object, name: str) -> list[Row]:
    """Return checked rows with the key `prompt`. `name` is the argument's name in error messages.

    A string is one prompt, unless it is the path of a file or folder, which is read. A mapping of columns, a data frame
    (pandas, polars, pyarrow) and a `datasets.Dataset` give rows; anything else is iterated. Raise ValueError for an
    invalid prompt."""
    items, source = _items(given, name)
    padded = comes_from_arrow(given) or any(comes_from_arrow(item) or came_through_pandas(item) for item in items)
    rows = [_row(item, f"row {i} of {source}") for i, item in enumerate(items)]
    if not rows:
        raise ValueError(f"{source} is empty: {FORMS}")
    return [without_padding(row) for row in rows] if padded else rows


def _items(given: object, name: str) -> tuple[list[object], str]:
    """Return the prompts or rows, and the name of their source in error messages."""
    if given is None:
        raise ValueError(f"{name} is missing: {FORMS}")
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_path(given, name)):
        return _read(os.fspath(given), name)
    if isinstance(given, str):
        return [given], name
    if isinstance(given, Mapping):
        return _from_columns(given, name), name
    if hasattr(given, "columns") and hasattr(given, "iloc"):  # pandas, whose missing values are NaN
        return given.astype(object).where(given.notna(), None).to_dict(orient="records"), name
    for method in ("to_dicts", "to_pylist"):  # polars; pyarrow
        if hasattr(given, method):
            return getattr(given, method)(), name
    if isinstance(given, (bytes, set, frozenset)) or not is_iterable(given):
        order = "; the order of arguments is model, prompts, reward_funcs" if callable(given) else ""
        raise ValueError(f"{name} is {described(given)}: {FORMS}{order}")
    items = list(given)
    return ([items] if is_conversation(items) else items), name


def _is_path(text: str, name: str) -> bool:
    """Return whether a string is the path of an existing file or folder. Raise ValueError if it looks like the path of
    a data file that does not exist."""
    try:
        path = Path(text).expanduser()
        exists = bool(text.strip()) and path.exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a zero byte, no such user
        return False
    if not exists and path.suffix.lower() in _DATA_FILES and "\n" not in text:
        raise ValueError(f"{name} names the file {text}, which does not exist (if it is a prompt, write [{text!r}])")
    return exists


def _read(path: str, name: str) -> tuple[list[object], str]:
    try:
        found = load_dataset_from_path(path)
    except (ValueError, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{name} is the path {in_a_line(path, 200)} (if it is a prompt, give it in a list), which cannot be read: {why}"
        ) from None
    rows = [row_at(found, i) for i in range(len(found))]
    if path.lower().endswith(".txt"):  # its lines are the prompts
        rows = [{"prompt": row["text"]} if set(row) == {"text"} else row for row in rows]
    return rows, f"{name} ({path})"


def _from_columns(given: Mapping[str, object], name: str) -> list[object]:
    if "prompt" not in given:
        raise ValueError(f"{name} is a mapping without the key 'prompt', it has {names_of(given)}: {FORMS}")
    if isinstance(given["prompt"], str) or is_conversation(plain(given["prompt"])):
        return [given]  # one row
    lengths = {
        key: len(value) if hasattr(value, "__len__") and not isinstance(value, (str, Mapping)) else described(value)
        for key, value in given.items()
    }
    if len(set(lengths.values())) > 1 or not isinstance(lengths["prompt"], int):
        shown = ", ".join(f"{in_a_line(key)} has {length}" for key, length in lengths.items())
        raise ValueError(f"{name} is a mapping of columns, which must be lists of one length: {shown}")
    return [dict(zip(given, values)) for values in zip(*given.values())]


def _row(item: object, where: str) -> Row:
    if hasattr(item, "_asdict"):  # a row of DataFrame.itertuples
        item = item._asdict()
    elif hasattr(item, "iloc") and all(isinstance(key, str) for key in item.index):  # a row of DataFrame.iterrows
        item = item.to_dict()
    row = plain(item)
    if isinstance(row, str) or is_conversation(row):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} is {described(item)}; a row is a text, a conversation (a list of messages with role and content), "
            'or a mapping such as {"prompt": "1+1=", "answer": "2"}'
        )
    wrong = next((key for key in row if not isinstance(key, str)), None)
    if wrong is not None:
        raise ValueError(f"{where} has the key {in_a_line(wrong)}; keys must be texts")
    if "prompt" not in row:
        raise ValueError(f"{where} has no key 'prompt', it has {names_of(row)}")
    taken = next((key for key in _RESERVED if key in row), None)
    if taken is not None:
        raise ValueError(f"{where} has the key {taken!r}, under which reward functions get something else: rename it")
    prompt_of(row["prompt"], where)
    return row


# ---- from rows to a data set


def dataset_of(
    rows: list[Row], tokenizer: TokenizerType, limit: int, name: str = "prompt", limit_name: str = "max_length"
) -> AllTaskProcessedDataset:
    """Return the rows as a data set. Raise ValueError for the first prompt that the chat template rejects, or that
    leaves no room for a response within `limit` tokens."""
    for i, row in enumerate(rows):
        prompt = prompt_of(row["prompt"], f"{name} {i}")
        if isinstance(prompt, str) and len(prompt.encode()) < limit // 2:  # a token is at least one byte, except BOS
            continue
        try:
            length = len(prompt_message(prompt, tokenizer, tools_of(row))["token_ids"])
        except ValueError as error:
            raise ValueError(f"{name} {i}: {error}") from error
        if length >= limit:
            raise ValueError(
                f"{name} {i} has {length} tokens, which leaves no room to answer within {limit_name}={limit}"
            )
    return AllTaskProcessedDataset(ListDataset(rows), tokenizer, TaskDataSpec(TASK), _processor, max_seq_length=limit)


def prompt_message(prompt: Prompt, tokenizer: TokenizerType, tools: list[dict[str, object]] | None = None) -> Message:
    """Return a message with text and token ids, from a text or from a conversation rendered by the chat template."""
    messages = None if isinstance(prompt, str) else list(prompt)
    text = prompt if messages is None else render_prompt(tokenizer, messages, tools=tools)
    ids = torch.tensor(prompt_ids(tokenizer, text, messages), dtype=torch.int64)
    return {"role": "user", "content": text, "token_ids": ids}


def _processor(
    row: Row, spec: TaskDataSpec, tokenizer: TokenizerType, max_seq_length: int | None, idx: int
) -> DatumSpec:
    message = prompt_message(prompt_of(row["prompt"], f"prompt {idx}"), tokenizer, tools_of(row))
    return DatumSpec(
        message_log=[message],
        length=len(message["token_ids"]),
        extra_env_info={key: value for key, value in row.items() if key != "prompt"},
        loss_multiplier=1.0,
        idx=idx,
        task_name=TASK,
    )
