"""Conversion of prompts and rows to conversations: lists of messages {"role", "content"}. Data sets, `train_grpo` and
`generate` use the same rules. The messages of ValueErrors lack the file and the row, which the caller adds."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TypeGuard, TypeVar

from nemo_rl_cpp.argument_checks import described, in_a_line, is_iterable, names_of
from nemo_rl_cpp.data.interfaces import Indexed, Row

_ARROW = ("datasets", "pandas", "polars", "pyarrow")


def plain(value: object) -> object:
    """Convert a value recursively to Python's types. Null entries of mappings inside an array of objects are removed
    (see `without_padding`), because such an array comes from an Arrow column through pandas."""
    names = ("tolist", "to_list", "as_py")  # numpy, torch and pandas; polars; scalars of pyarrow
    convert = next((getattr(value, name) for name in names if hasattr(value, name)), None)
    if convert is not None and not isinstance(value, type):
        if _holds_objects(value):
            return _unpadded([plain(item) for item in value])
        value = convert()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def comes_from_arrow(rows: object) -> bool:
    """Return whether the table or data set `rows` comes from a library that uses Arrow's column format."""
    return any(base.__module__.partition(".")[0] in _ARROW for base in type(rows).__mro__)


def came_through_pandas(row: object) -> bool:
    """Return whether a row came from Arrow through pandas: a value is then a one-dimensional array of objects."""
    return isinstance(row, Mapping) and any(_holds_objects(value) for value in row.values())


def _holds_objects(value: object) -> bool:
    return str(getattr(value, "dtype", "")) == "object" and getattr(value, "ndim", 0) == 1


def without_padding(row: Row) -> Row:
    """Return a copy of the row without the null entries of mappings in its columns: all structs of an Arrow column have
    the same keys, so such an entry may only mean that another row has the key. Columns that are null stay, and NaN (an
    empty cell) becomes null."""
    empty = {name for name, value in row.items() if isinstance(value, float) and math.isnan(value)}
    return {name: None if name in empty else _unpadded(value) for name, value in row.items()}


def _unpadded(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _unpadded(item) for key, item in value.items() if item is not None}
    return [_unpadded(item) for item in value] if isinstance(value, list) else value


def row_at(rows: Indexed[Row], index: int) -> Row:
    """Return row `index` of a data set without the nulls that Arrow adds to mappings (see `without_padding`)."""
    return without_padding(rows[index]) if comes_from_arrow(rows) else rows[index]


T = TypeVar("T")
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
# a conversation written as a JSON or Python string
_WRITTEN_OUT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
ChatMessage = dict[str, object]  # a message of a prompt: role, content, and further keys that the chat template reads


def look_up(row: Mapping[str, object], key: str) -> object:
    """Return the value of the column `key`, or for a dotted key (`reward_model.ground_truth`) a value inside a column.
    Raise ValueError, with the existing keys, if there is no such column or value."""
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = f"the keys {list(value)}" if isinstance(value, Mapping) else f"no keys: it is {_kind(value)}"
            where = "the row" if value is row else repr(key[: key.index(part)].rstrip("."))
            raise ValueError(f"the key {key!r} is missing; {where} has {there}")
        value = value[part]
    return value


def conversation_of(value: object, key: str) -> list[ChatMessage]:
    """Return a question as a list of messages: a user message for a string or number, or a list of {"role", "content"}
    or of {"from", "value"} (ShareGPT). Raise ValueError, with `key` in its message, for anything else."""
    value = text_of(value) if not isinstance(value, float) or math.isfinite(value) else value
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key!r} is an empty text")
        if key in ("messages", "conversations") or _WRITTEN_OUT.match(value):
            raise ValueError(f"{key!r} is a text, expected a list of messages: {value[:60]!r}; store the list itself")
        check_characters(value, repr(key))
        return [{"role": "user", "content": value}]
    if not is_list(value):
        raise ValueError(f"{key!r} must be a text or a list of messages, not {_kind(value)}")
    if not value:
        raise ValueError(f"{key!r} is an empty list of messages")
    return [_message(message, f"{key}[{i}]") for i, message in enumerate(value)]


def question_and_answer(question: str, answer: object) -> list[ChatMessage]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def text_of(value: T) -> T | str:
    """Convert a number to a string, so that it can be the content of a message. Return anything else unchanged. Floats
    and decimals are written without an exponent, because math-verify parses 1e-05 as a product with Euler's number."""
    if isinstance(value, (float, Decimal)) and math.isfinite(value):
        return f"{Decimal(str(value)):f}"
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list or another sequence, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _message(message: object, key: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ValueError(f"{key} must be a message {{'role', 'content'}}, not {_kind(message)}")
    if "role" not in message and "from" in message and "value" in message:
        if not isinstance(message["from"], str) or message["from"] not in _SHAREGPT_ROLES:
            raise ValueError(f"{key}.from is {in_a_line(message['from'])}; known are {', '.join(_SHAREGPT_ROLES)}")
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"], **others}
    if "role" not in message:
        raise ValueError(f"{key} has no 'role'; it has {names_of(message)}, expected 'role' and 'content'")
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        raise ValueError(f"{key}.role is {in_a_line(message['role'])}; known are {', '.join(ROLES)}")
    return dict(message)


def split_conversation(messages: object, key: str = "messages") -> tuple[list[ChatMessage], object]:
    """Split a conversation into (prompt, ground truth). The ground truth is the content of the last message if it is
    the assistant's, otherwise None. The prompt, the messages before it, must end with the user or a tool's result. Text
    parts of a content are joined. Raise ValueError, with `key` in its message, for anything else."""
    if not is_list(messages):
        raise ValueError(f"{key!r} must be a list of messages, not {_kind(messages)}")
    checked, truth = conversation_of(messages, key), None
    if checked[-1]["role"] == "assistant":
        truth = checked.pop().get("content")
        truth = joined_text(truth) if is_parts(truth) else truth
    prompt = [_with_text(message, f"{key}[{i}]") for i, message in enumerate(checked)]
    if not any(message["role"] == "user" for message in prompt):
        raise ValueError(f"{key!r} holds no message of the user, so there is no question")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"{key!r} must end with the user's question, or with it and one assistant message as the answer; "
            f"its roles are {', '.join(str(m['role']) for m in checked)}{', assistant' if len(checked) < len(messages) else ''}"
        )
    return prompt, truth


def check_characters(text: str, where: str) -> None:
    """Raise ValueError, beginning with `where`, if a text has a lone surrogate, which no tokenizer or file accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        text = f"{where} holds half a character at position {error.start} (a lone surrogate)"
        raise ValueError(f"{text}: decode its source as UTF-8") from None


def is_conversation(items: object) -> bool:
    """Return whether `items` is a list of messages ({"role", "content"} or ShareGPT), rather than a list of rows."""
    if not isinstance(items, (list, tuple)) or not items or not all(isinstance(item, Mapping) for item in items):
        return False
    return all(("role" in item or {"from", "value"} <= item.keys()) and "prompt" not in item for item in items)


def prompt_of(value: object, where: str, may_be_empty: bool = False) -> str | list[ChatMessage]:
    """Return a prompt as a string, or as the messages of a conversation that the model can continue. Raise ValueError,
    beginning with `where`, for anything else, and for an empty text unless `may_be_empty`."""
    if isinstance(value, str):
        if not value and not may_be_empty:
            raise ValueError(f"{where} is an empty text: a prompt needs at least one character")
        check_characters(value, where)
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"{where}: the prompt is {described(value)}, not a text or messages with role and content")
    if not value:
        raise ValueError(f"{where} is an empty conversation: it needs a message of the user")
    try:
        checked = conversation_of(value, "messages")
        if checked[-1]["role"] == "assistant":
            raise ValueError("it ends with a message of the assistant: leave out the answer, which the model writes")
        return split_conversation(checked)[0]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def prompts_of(prompts: object) -> list[str | list[ChatMessage]]:
    """Return a list of prompts (see `prompt_of`) from a string, a conversation, or a list of these. Raise ValueError for
    anything else."""
    if isinstance(prompts, str) or is_conversation(prompts):
        several: list[object] = [prompts]
    elif isinstance(prompts, (bytes, Mapping)) or not is_iterable(prompts):
        raise ValueError(f"prompts is {described(prompts)}; give a text, a conversation, or a list of these")
    else:
        several = plain(prompts if hasattr(prompts, "dtype") else list(prompts))
        several = [several] if is_conversation(several) else several
    return [prompt_of(prompt, f"prompt {i}") for i, prompt in enumerate(several)]


def _with_text(message: ChatMessage, key: str) -> ChatMessage:
    content = message.get("content")
    if is_parts(content):
        message = {**message, "content": joined_text(content, key)}
        content = message["content"]
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return message
    if not isinstance(content, str):
        raise ValueError(f"{key}.content must be a text, not {_kind(content)}")
    check_characters(content, f"{key}.content")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{key}.content is an empty text")
    return message


def is_parts(content: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """Return whether the content of a message is a list of parts such as {"type": "text", "text": ...}."""
    return is_list(content) and bool(content) and all(isinstance(part, Mapping) and "type" in part for part in content)


def joined_text(parts: Sequence[Mapping[str, object]], key: str = "content") -> str:
    """Return the joined texts of a content's parts. Raise ValueError, with `key`, for a part that is not text."""
    for part in parts:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{key} has a part of type {in_a_line(part['type'])}: only text is supported")
    return "".join(str(part["text"]) for part in parts)


def tools_of(row: Mapping[str, object]) -> list[dict[str, object]] | None:
    """Return the column `tools` of a row, which may be a JSON string, as a list of JSON schemas, or None."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"'tools' is no JSON: {error}") from None
    if not tools:
        return None
    if not is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("'tools' must be a list of JSON schemas: [{'type': 'function', 'function': {...}}]")
    return [dict(tool) for tool in tools]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if is_list(value):
        return "a list" if not value else f"a list of {_kind(value[0]).removeprefix('a ')}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {names_of(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} (an empty cell of a table, perhaps)"
    kinds = {str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)
