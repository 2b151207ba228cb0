"""A configuration as YAML text, without a YAML library."""

from __future__ import annotations

import json
import re
from typing import Any

# Plain words that no YAML reader takes for something else.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan", "."}


def to_yaml(value: Any, indent: int = 0) -> str:
    """The text of a mapping; loading it gives the same values."""
    lines: list[str] = []
    for key, item in value.items():
        head = f"{'  ' * indent}{_scalar(str(key))}:"
        if isinstance(item, dict) and item:
            lines += [head, to_yaml(item, indent + 1)]
        elif isinstance(item, (list, tuple)) and any(isinstance(part, dict) for part in item):
            lines.append(head)
            lines += [f"{'  ' * (indent + 1)}- {_flow(part)}" for part in item]
        else:
            lines.append(f"{head} {_flow(item)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS and not text.startswith("."):
        return text
    return json.dumps(text, ensure_ascii=False)
