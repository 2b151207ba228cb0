"""Reads configurations that may be mappings or pydantic models, and turns values into plain JSON ones."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MISSING = object()


def cfg_get(config: Any, key: str, default: Any = None) -> Any:
    """The value of `key` in a mapping, a pydantic model or any object with attributes; `default` where it is absent.

    A dotted key walks down (`"wandb.project"`). A key that is present with the value None gives None.
    """
    node = config
    for part in key.split("."):
        if node is None:
            return default
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else getattr(node, part, _MISSING)
        if node is _MISSING:
            return default
    return node


def to_plain(value: Any) -> Any:
    """A copy made of dicts, lists, strings, numbers, booleans and None only (paths, enums and arrays are converted).

    Non-finite floats stay floats; see `to_json` for their spelling in files.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        # enum members that are also str or int are written as their value
        return value.value if hasattr(value, "_value_") else value
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump(by_alias=True))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if hasattr(value, "_value_"):
        return to_plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_plain(value.detach().cpu().tolist() if hasattr(value, "detach") else value.tolist())
    return str(value)


def to_json(value: Any) -> Any:
    """`to_plain`, with non-finite floats as the strings "nan", "inf" and "-inf": JSON has no other spelling for them."""
    return _spell_non_finite(to_plain(value))


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spell_non_finite(item) for item in value]
    return value


def as_number(value: Any) -> float | None:
    """`value` as a float, also from the strings that `to_json` writes for non-finite numbers; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def written(config: Any) -> Any:
    """A configuration as plain data that may stand in files: what came from an environment variable is its `${oc.env:...}`
    again (`config.environment_values` knows the keys; a copy of such a text under another key goes too), and values whose
    key names a secret are `***`."""
    plain = to_plain(config)
    texts = getattr(config, "environment_values", None) or {}
    copies = {}
    for key, text in texts.items():
        value = _put(plain, key.split("."), text)
        if isinstance(value, str) and len(value) >= 6:
            copies[value] = text
    return redact(_replaced(plain, copies) if copies else plain)


def _replaced(node: Any, copies: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(item, copies) for key, item in node.items()}
    if isinstance(node, list):
        return [_replaced(item, copies) for item in node]
    return copies.get(node, node) if isinstance(node, str) else node


def _put(node: Any, path: list[str], value: Any) -> Any:
    """Puts `value` at a place that is there, and returns what it held; nothing where the place is not there."""
    for i, part in enumerate(path):
        index: Any = int(part) if isinstance(node, list) and part.isdigit() else part
        if not (
            index in node
            if isinstance(node, dict)
            else isinstance(node, list) and isinstance(index, int) and index < len(node)
        ):
            return None
        if i + 1 == len(path):
            node[index], old = value, node[index]
            return old
        node = node[index]
    return None


_SECRET = re.compile(r"(api_?key|password|secret|auth_?token|access_?token|hf_token|credential)", re.IGNORECASE)


def redact(value: Any) -> Any:
    """A copy of plain data in which values whose key names a secret (api_key, password, hf_token, ...) are `***`."""
    if isinstance(value, dict):
        return {
            key: "***" if _SECRET.search(key) and isinstance(item, str) and item else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value
