"""Convert configuration values to plain data (for JSON files), and Python values to configuration values."""

import math
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.dotted_names import PythonObjectRef
from nemo_rl_cpp.files.yaml_text import Plain

from .errors import ConfigError, Problem


def to_plain(value: object) -> Plain:
    """Return `value` as plain data: dicts, lists, strings, numbers, booleans and None. Sections, enums and arrays are
    converted; paths and objects of other types become strings. Non-finite floats stay floats, unlike in `to_json`."""
    if isinstance(value, Enum):  # includes StrEnum and IntEnum
        return to_plain(value.value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)  # turns a subclass of str into a plain str
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
    """Return `config` as plain dictionaries and lists, with only the keys that were set explicitly, not defaults."""
    if isinstance(config, BaseModel):
        config = config.model_dump(exclude_unset=True, by_alias=False)
    if isinstance(config, Mapping):
        return {key: as_written(value) for key, value in config.items()}
    return [as_written(value) for value in config] if isinstance(config, (list, tuple)) else config


def to_json(value: object) -> Plain:
    """Return `to_plain(value)` with the floats nan, inf and -inf, which JSON lacks, as strings."""
    return mapped(to_plain(value), lambda v: repr(v) if isinstance(v, float) and not math.isfinite(v) else v)


def mapped(node: Plain, leaf: Callable[[Plain], Plain]) -> Plain:
    """Return a copy of plain data in which `leaf(value)` replaces every value that is neither a dict nor a list."""
    if isinstance(node, dict):
        return {key: mapped(item, leaf) for key, item in node.items()}
    return [mapped(item, leaf) for item in node] if isinstance(node, list) else leaf(node)


def as_number(value: object) -> float | None:
    """Return a number, or "nan", "inf" or "-inf" as `to_json` writes them, as a float; anything else as None."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def written(config: BaseModel | Mapping[str, object]) -> dict[str, Plain]:
    """Return a configuration as plain data that contains no secrets, so that it can be saved. Values read from an
    environment variable are replaced by `${oc.env:NAME}`, and values of keys such as api_key and password by `***`."""
    texts: dict[str, str] = getattr(config, "environment_texts", {})

    def shown(value: Plain) -> Plain:
        for secret in sorted(texts, key=len, reverse=True) if isinstance(value, str) else ():
            value = value.replace(secret, texts[secret])
        return value

    return cast("dict[str, Plain]", redact(mapped(to_plain(config), shown)))


_SECRET = re.compile(r"(api_?key|password|secret|auth_?token|access_?token|hf_token|credential)", re.IGNORECASE)


def redact(value: Plain) -> Plain:
    """Return a copy of plain data in which the values of keys such as api_key, password and hf_token are `***`."""
    if isinstance(value, dict):
        return {
            key: "***" if _SECRET.search(key) and isinstance(item, str) and item else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


def plain(value: object) -> object:
    """Return a Python value as a configuration value: tuples and arrays as lists, paths as strings, enums by value,
    scalars as numbers. Raise ConfigError for a mapping key that is not a string."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return value if isinstance(value, PythonObjectRef) else str(value)
    if isinstance(value, Mapping):
        return plain_values(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `values`, each converted by `plain`. Raise ConfigError if a key is not a string."""
    wrong = next((key for key in values if not isinstance(key, str)), None)
    if wrong is not None:
        text = f"the keys of a mapping must be texts, not {type(wrong).__name__} ({in_a_line(wrong)})"
        raise ConfigError([Problem("", "", text)])
    return {str(key): plain(item) for key, item in values.items()}
