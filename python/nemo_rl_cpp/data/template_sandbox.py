"""The sandbox of chat templates: jinja's own, in which no operation takes all memory or cannot be interrupted.

jinja keeps a template from Python's inside. What it does not limit is the size of what a template makes: one call of
`center`, one `~` in a loop, one format width can ask for more than the machine has. Here the size of a value is estimated
before it is made (`data/template_sizes.py`), and refused where it, or the sum of all, is beyond what any prompt has.
"""

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from nemo_rl_cpp.data import template_sizes as sizes

LARGEST_VALUE = sizes.LARGEST_VALUE
LARGEST_SUM = 1_000_000_000
"""Characters, items and digits of all values that one rendering makes."""


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


def _joined(pieces: Iterable[object], what: str = "~") -> str:
    texts, size = [], 0
    for piece in pieces:
        size += sizes.of_value(piece)
        if size > LARGEST_VALUE:
            break
        texts.append(piece if isinstance(piece, str) else str(piece))
    count(size, what)
    return "".join(texts)


def _shown(value: object) -> object:
    """A value on its way into the text, which jinja turns into one."""
    if not isinstance(value, str):
        count(sizes.of_value(value), "an output")
    return value


def _sliced(value: Any, part: slice) -> object:
    if isinstance(value, (str, list, tuple)):
        count(len(value), "a slice")
    return value[part]


class _Compiler(jinja2.compiler.CodeGenerator):
    """Has `~` and slices made by the sandbox."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802 - jinja's name
        if not isinstance(node.arg, jinja2.nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
            self.write(", ")
        self.write("))")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox with limits. A SecurityError names the operation that went beyond one."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    code_generator_class = _Compiler
    joined = staticmethod(_joined)
    sliced = staticmethod(_sliced)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, finalize=_shown, **kwargs)
        self.concat = lambda pieces: _joined(pieces, "the text")
        self.filters = {name: limited_filter(name, apply) for name, apply in self.filters.items()}

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        count(sizes.of_operation(operator, left, right), operator)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: object, *args: Any, **kwargs: object) -> object:  # noqa: N805 - jinja's names
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # what is looked at twice
            count(sizes.of_method(method.__name__, owner, args, kwargs), method.__name__)
        return super().call(__context, __obj, *args, **kwargs)


def limited_filter(name: str, apply: Callable[..., object]) -> Callable[..., object]:
    """A filter that counts what it is about to make."""
    at = 1 if getattr(apply, "jinja_pass_arg", None) is not None else 0  # of the value, behind what jinja passes

    @wraps(apply)
    def limited(*args: Any, **kwargs: object) -> object:
        if len(args) <= at:
            return apply(*args, **kwargs)
        value = args[at]
        if name == "join":
            value = list(value)
        count(sizes.of_filter(name, value, args[at + 1 :], kwargs), name)
        return apply(*args[:at], value, *args[at + 1 :], **kwargs)

    return limited
