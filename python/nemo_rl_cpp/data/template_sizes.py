"""How large the values are that an operation of a chat template would make: estimates from above, in characters or items."""

import re
import string
from collections.abc import Mapping
from typing import Any

LARGEST_VALUE = 10_000_000
"""Characters, items or digits of one value that an operation makes."""
_NUMBER = 24  # characters of a number that is no large integer
_PERCENT = re.compile(r"%(?:\(([^)]*)\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?[diouxXeEfFgGcrsa%]")
_WIDTHS = re.compile(r"\d+")
_PADDING = ("center", "ljust", "rjust", "zfill")


def of_value(value: object) -> int:
    """Of a value as a text; nested ones are looked through until the sum is beyond LARGEST_VALUE."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if not isinstance(value, (list, tuple, Mapping)):
        return _NUMBER
    size = 2
    for item in value.items() if isinstance(value, Mapping) else value:
        size += of_value(item) + 4
        if size > LARGEST_VALUE:
            break
    return size


def of_operation(operator: str, left: object, right: object) -> int:
    """Of `left operator right`."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * abs(right)
        return left.bit_length() + right.bit_length() if operator == "*" else 0
    if operator == "+":
        both = (left, right)
        return sum(map(len, both)) if all(isinstance(v, (str, list, tuple)) for v in both) else 0
    if operator == "%" and isinstance(left, str):
        return of_percent(left, right)
    for sequence, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            return max(len(sequence) * times, 0)
    return 0


def of_percent(form: str, given: object) -> int:
    """Of `form % given`: its text, its widths and what it is given."""
    specs = list(_PERCENT.finditer(form))
    values = given if isinstance(given, tuple) else (given,)
    size = len(form) + sum(int(width) for spec in specs for width in spec.groups()[1:] if width and width != "*")
    if any("*" in spec.groups()[1:] for spec in specs):
        size += sum(abs(v) for v in values if isinstance(v, int))
    if isinstance(given, Mapping):
        return size + sum(of_value(given.get(spec[1], "")) for spec in specs if spec[1] is not None)
    return size + sum(map(of_value, values))


def of_format(form: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
    """Of `form.format(*args, **kwargs)`."""
    try:
        fields = list(string.Formatter().parse(form))
    except ValueError:  # which the call will say
        return len(form)
    size, everything = len(form), (*args, *kwargs.values())
    for number, (_, name, spec, _) in enumerate(fields):
        if name is None:
            continue
        size += sum(int(width) for width in _WIDTHS.findall(spec or ""))
        if "{" in (spec or ""):  # a width from an argument
            size += sum(abs(v) for v in everything if isinstance(v, int))
        first = re.split(r"[.\[]", name)[0]
        index = number if first == "" else int(first) if first.isdigit() else None
        if first in kwargs:
            size += of_value(kwargs[first])
        elif index is not None and index < len(args):
            size += of_value(args[index])
        else:
            size += max(map(of_value, everything), default=0)
        if size > LARGEST_VALUE:
            break
    return size


def of_method(name: str, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> int:
    """Of `owner.name(*args, **kwargs)`, where it makes text or items."""
    numbers = [abs(v) for v in (*args, *kwargs.values()) if isinstance(v, int)]
    if name in _PADDING:
        return max([len(owner), *numbers[:1]])
    if name == "expandtabs":
        return len(owner) + owner.count("\t") * (numbers[0] if numbers else 8)
    if name == "format":
        return of_format(owner, args, kwargs)
    if name == "format_map":
        return of_format(owner, (), args[0] if args and isinstance(args[0], Mapping) else {})
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        return len(owner) + owner.count(args[0]) * len(args[1])
    if name == "join" and args:
        return sum(of_value(piece) + len(owner) for piece in args[0])
    if name == "translate" and args and isinstance(args[0], Mapping):
        return len(owner) * max([1, *(len(v) for v in args[0].values() if isinstance(v, str))])
    return len(owner)


def of_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of `value | name(*args, **kwargs)`."""
    numbers = [abs(v) for v in (*args, *kwargs.values()) if isinstance(v, int)]
    own = len(value) if isinstance(value, (str, list, tuple)) else 0
    if name == "center":
        return max([own, *numbers[:1]])
    if name == "indent":
        width = len(args[0]) if args and isinstance(args[0], str) else (numbers[0] if numbers else 4)
        return own + (str(value).count("\n") + 1) * width if isinstance(value, str) else own
    if name in ("batch", "slice"):
        return own + (numbers[0] if numbers else 0)
    if name == "format":
        return of_percent(value, args or dict(kwargs)) if isinstance(value, str) else own
    if name == "replace" and len(args) >= 2:
        text = value if isinstance(value, str) else str(value) if of_value(value) <= LARGEST_VALUE else ""
        return of_value(value) + text.count(str(args[0])) * len(str(args[1]))
    if name == "join":
        separator = args[0] if args else kwargs.get("d", "")
        return sum(of_value(piece) + of_value(separator) for piece in value)
    if name == "tojson":
        return _of_json(value, args, kwargs)
    if name in ("string", "pprint", "xmlattr", "urlencode", "escape", "e", "forceescape"):
        return 6 * of_value(value) if name != "string" else of_value(value)
    return own


def _of_json(value: object, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> int:
    """Characters, escaped at worst, and for each item an indented line and separators."""
    options = dict(zip(("ensure_ascii", "indent", "separators", "sort_keys"), args)) | dict(kwargs)
    size = (6 if options.get("ensure_ascii") else 2) * of_value(value)
    if size > LARGEST_VALUE:
        return size
    items, depth = _items(value)
    indent, separators = options.get("indent"), options.get("separators") or ()
    width = len(indent) if isinstance(indent, str) else abs(indent) if isinstance(indent, int) else 0
    each = width * depth + sum(len(s) for s in separators if isinstance(s, str)) + 1
    return size + items * each


def _items(value: object) -> tuple[int, int]:
    """(how many values there are in all, how deeply they are nested), of what `of_value` has found small enough."""
    if not isinstance(value, (list, tuple, Mapping)):
        return 1, 1
    inner = [_items(item) for item in (value.values() if isinstance(value, Mapping) else value)]
    return 1 + sum(count for count, _ in inner), 1 + max((depth for _, depth in inner), default=0)
