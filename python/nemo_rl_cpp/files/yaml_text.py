"""Write plain data as YAML text (block style) that any YAML reader parses to the same types."""

import json
import math
import re
from collections.abc import Mapping, Sequence

Plain = Mapping[str, "Plain"] | Sequence["Plain"] | str | int | float | bool | None
"""The values of JSON and YAML: mappings with string keys, lists, strings, numbers, booleans and null."""

_PLAIN_STRING = re.compile(r"[A-Za-z_][A-Za-z0-9_./\-]*")
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "none"}


def dump_yaml(value: Plain) -> str:
    """Return `value` as YAML text. Floats always contain a dot, because a YAML 1.1 reader reads `1e-06` as a string."""
    if isinstance(value, (dict, list)) and value:
        return "\n".join(_lines(value, 0)) + "\n"
    return _scalar(value) + "\n"


def _lines(value: dict[str, Plain] | list[Plain], indent: int) -> list[str]:
    pad = "  " * indent
    items = [("-", item) for item in value]
    if isinstance(value, dict):
        items = [(f"{_scalar(str(key))}:", item) for key, item in value.items()]
    lines: list[str] = []
    for head, item in items:
        if isinstance(item, (dict, list)) and item:
            lines.append(pad + head)
            lines.extend(_lines(item, indent + 1))
        else:
            lines.append(f"{pad}{head} {_scalar(item)}")
    return lines


def _scalar(value: Plain) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (dict, list)):
        return "{}" if isinstance(value, dict) else "[]"
    text = str(value)
    if _PLAIN_STRING.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return json.dumps(text, ensure_ascii=False)


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    mantissa, _, exponent = repr(value).partition("e")
    if "." not in mantissa:
        mantissa += ".0"
    if not exponent:
        return mantissa
    return f"{mantissa}e{exponent if exponent[0] in '+-' else '+' + exponent}"
