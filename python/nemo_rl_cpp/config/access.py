"""Turns values into plain ones for JSON files, and Python values into those of a configuration."""

import math
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast, overload

from pydantic import BaseModel

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.dotted_names import PythonObjectRef
from nemo_rl_cpp.files.yaml_text import Plain

from .errors import ConfigError, Problem

_MAX_DEPTH = 64


@overload
def to_plain(value: Mapping[str, object]) -> dict[str, Plain]: ...


@overload
def to_plain(value: object) -> Plain: ...


def to_plain(value: object) -> Plain:
    """A copy made of dicts, lists, strings, numbers, booleans and None only (paths, enums and arrays are converted).

    Non-finite floats stay floats; see `to_json` for their spelling in files.
    """
    if isinstance(value, Enum):  # also one that is a str or an int
        return to_plain(value.value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)  # of a class derived from it the text
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump(by_alias=True))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_plain(value.detach().cpu().tolist() if hasattr(value, "detach") else value.tolist())
    return str(value)


def as_written(config: object) -> Any:
    """Sections as dictionaries, with only the keys that were written; mappings and lists are copied, all else stays."""
    if isinstance(config, BaseModel):
        config = config.model_dump(exclude_unset=True, by_alias=False)
    if isinstance(config, Mapping):
        return {key: as_written(value) for key, value in config.items()}
    return [as_written(value) for value in config] if isinstance(config, (list, tuple)) else config


def to_json(value: object) -> Plain:
    """`to_plain`, with non-finite floats as the strings "nan", "inf" and "-inf": JSON has no other spelling for them."""
    return mapped(
        to_plain(value), lambda leaf: repr(leaf) if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
    )


def mapped(node: Plain, leaf: Callable[[Plain], Plain]) -> Plain:
    """A copy of plain data with `leaf(value)` for every value in it."""
    if isinstance(node, dict):
        return {key: mapped(item, leaf) for key, item in node.items()}
    return [mapped(item, leaf) for item in node] if isinstance(node, list) else leaf(node)


def as_number(value: object) -> float | None:
    """`value` as a float, also from the strings that `to_json` writes for non-finite numbers; None for anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def written(config: BaseModel | Mapping[str, object]) -> dict[str, Plain]:
    """A configuration as plain data that may stand in files: what came from an environment variable is its `${oc.env:...}`
    again (`config.environment_values` knows the keys; a copy of such a text under another key goes too), and values whose
    key names a secret are `***`."""
    plain = to_plain(config)
    texts: dict[str, str] = getattr(config, "environment_values", None) or {}
    copies: dict[str, str] = {}
    for key, text in texts.items():
        value = _put(plain, key.split("."), text)
        if isinstance(value, str) and len(value) >= 6:
            copies[value] = text
    shown = mapped(plain, lambda value: copies.get(value, value) if isinstance(value, str) else value)
    return cast("dict[str, Plain]", redact(shown))


def _put(node: Plain, path: list[str], value: str) -> Plain:
    """Puts `value` at a place that is there, and returns what it held; nothing where the place is not there."""
    key, *rest = path
    if isinstance(node, list):
        index = int(key) if key.isdigit() else len(node)
        if index >= len(node):
            return None
        if rest:
            return _put(node[index], rest, value)
        node[index], old = value, node[index]
        return old
    if not isinstance(node, dict) or key not in node:
        return None
    if rest:
        return _put(node[key], rest, value)
    node[key], old = value, node[key]
    return old


_SECRET = re.compile(r"(api_?key|password|secret|auth_?token|access_?token|hf_token|credential)", re.IGNORECASE)


def redact(value: Plain) -> Plain:
    """A copy of plain data in which values whose key names a secret (api_key, password, hf_token, ...) are `***`."""
    if isinstance(value, dict):
        return {
            key: "***" if _SECRET.search(key) and isinstance(item, str) and item else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


def plain(value: object, depth: int = 0) -> object:
    """`value` with tuples and arrays as lists, paths as texts and scalars of numpy and torch as Python's; all else as it is.

    Raises ConfigError for what no configuration can hold: a key that is no text, or nesting without an end.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if isinstance(value, str):
        return value if isinstance(value, PythonObjectRef) else str(value)
    if depth > _MAX_DEPTH:
        raise ConfigError([Problem("", "", f"a value is nested more than {_MAX_DEPTH} deep")])
    if isinstance(value, Mapping):
        return plain_values(value, depth)
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value), depth)
    # a scalar or an array of numpy or torch, a column of pandas
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    return value


def plain_values(values: Mapping[str, object], depth: int = 0) -> dict[str, object]:
    """A mapping with every value as by `plain`."""
    wrong = next((key for key in values if not isinstance(key, str)), None)
    if wrong is not None:
        said = f"the keys of a mapping must be texts, not {type(wrong).__name__} ({in_a_line(wrong)})"
        raise ConfigError([Problem("", "", said)])
    return {str(key): plain(item, depth + 1) for key, item in values.items()}
