"""The sandbox of chat templates: jinja's own, in which no operation takes all memory or cannot be interrupted.

jinja keeps a template from Python's inside. What it does not limit is the size of what a template makes: one call of
`center`, one `~` in a loop, one format width can ask for more than the machine has.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox

LARGEST_VALUE = 10_000_000
"""Characters, items or digits of one value that an operation makes."""
LARGEST_SUM = 1_000_000_000
"""The same of all values that one rendering makes."""
_WIDTH = re.compile(r"\d{8}|\*")  # in a format: a width or precision beyond every text, or one that an argument gives


class _Made(threading.local):
    total = 0


_made = _Made()


def begin_rendering() -> None:
    """A rendering on this thread has made nothing yet."""
    _made.total = 0


def count(size: int, what: str) -> None:
    """SecurityError where a value of this size, or all values together, are too large; called before it is made."""
    _made.total += size
    if size > LARGEST_VALUE:
        raise jinja2.exceptions.SecurityError(f"{what} would make a value of more than {LARGEST_VALUE} characters")
    if _made.total > LARGEST_SUM:
        raise jinja2.exceptions.SecurityError(f"its values come to more than {LARGEST_SUM} characters")


def _joined(pieces: Iterable[Any], what: str = "~") -> str:
    texts, size = [], 0
    for piece in pieces:
        texts.append(piece if isinstance(piece, str) else str(piece))
        size += len(texts[-1])
        if size > LARGEST_VALUE:
            break
    count(size, what)
    return "".join(texts)


class _Compiler(jinja2.compiler.CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox with limits. A SecurityError names the operation that went beyond one."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    code_generator_class = _Compiler
    joined = staticmethod(_joined)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.concat = lambda pieces: _joined(pieces, "the text")
        for name in ("center", "indent", "batch", "slice", "wordwrap", "replace", "join", "format", "truncate"):
            self.filters[name] = _limited_filter(name, self.filters[name])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        count(_size_of(operator, left, right), operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's names
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _checked(method.__name__, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _limited_filter(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if getattr(apply, "jinja_pass_arg", None) is not None else 0  # of the value, behind what jinja passes

    @wraps(apply)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value = args[at] if len(args) > at else ""
        if name == "join":
            value = list(value)
            separator = str(args[at + 1] if len(args) > at + 1 else kwargs.get("d", ""))
            count(sum(len(str(v)) + len(separator) for v in value), name)
            return apply(*args[:at], value, *args[at + 1 :], **kwargs)
        _checked(
            name, value if isinstance(value, str) else str(value) if name == "replace" else "", args[at + 1 :], kwargs
        )
        return apply(*args, **kwargs)

    return limited


def _checked(name: str, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method or filter of a text; SecurityError where its result would be too large."""
    given = (*args, *kwargs.values())
    for number in given:
        if isinstance(number, int) and abs(number) > LARGEST_VALUE:
            count(abs(number), name)
    if name in ("format", "format_map"):
        _check_format(name, owner, given)
    if name == "replace" and len(given) >= 2:
        count(len(owner) + owner.count(str(given[0])) * len(str(given[1])), name)
    elif name == "join" and args:
        pieces = [str(piece) for piece in args[0]]
        count(sum(map(len, pieces)) + len(owner) * len(pieces), name)
        return (pieces,)
    elif name == "expandtabs":
        count(len(owner) + owner.count("\t") * max([8, *(n for n in given if isinstance(n, int))]), name)
    elif name == "translate" and given and isinstance(given[0], dict):
        count(len(owner) * max([1, *(len(v) for v in given[0].values() if isinstance(v, str))]), name)
    return args


def _check_format(name: str, form: str, given: Any) -> None:
    """Widths of eight digits are refused, and widths from arguments where one of these is as large."""
    large = any(
        isinstance(n, int) and abs(n) > LARGEST_VALUE for n in (given if isinstance(given, (tuple, list)) else (given,))
    )
    found = [match.group() for match in _WIDTH.finditer(form)]
    if any(width != "*" for width in found) or (large and ("*" in found or form.count("{") > form.count("}}") + 1)):
        count(LARGEST_VALUE + 1, name)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """About how many digits, characters or items the result has."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * abs(right)
        return left.bit_length() + right.bit_length() if operator == "*" else 0
    if operator == "+":
        both = (left, right)
        return sum(map(len, both)) if all(isinstance(v, (str, list, tuple)) for v in both) else 0
    if operator == "%" and isinstance(left, str):
        _check_format("%", left, right)
        return len(left) + (len(str(right)) if isinstance(right, str) else 0)
    for sequence, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            return max(len(sequence) * times, 0)
    return 0
