"""Names of reward functions, and checks of what they return."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from nemo_rl_cpp.argument_checks import in_a_line


def function_name(function: Callable[..., object]) -> str:
    """The name of a function; for a partial the name of what it calls; for another object the name of its class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", None) or type(function).__name__)


def distinct_names(functions: Sequence[Callable[..., object]]) -> list[str]:
    """A name for each: those that several share are numbered (`<lambda>_1`, `<lambda>_2`)."""
    names = [function_name(function) for function in functions]
    taken = {name for name in names if names.count(name) == 1}
    distinct = []
    for name in names:
        if name not in taken:
            number = 1
            while f"{name}_{number}" in taken:
                number += 1
            name = f"{name}_{number}"
            taken.add(name)
        distinct.append(name)
    return distinct


def check_signature(function: Callable[..., object]) -> None:
    """ValueError for a function that cannot be called with keywords."""
    name = function_name(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        raise ValueError(
            f"reward function {name} has no signature that Python knows: wrap it in a function of (completions)"
        ) from None
    unnamed = next((p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty), None)
    if unnamed is not None:
        raise ValueError(
            f"reward function {name} takes {unnamed!r} by position only: it is called with keywords (completions=...)"
        )


def rewards_of(name: str, returned: object, rows: int) -> list[float | None]:
    """What a reward function returned as numbers (None: no say); ValueError unless it is one a completion, each finite."""
    wanted = f"reward function {name} must return one number a completion, a list of {rows}"
    if getattr(returned, "ndim", 1) > 1:
        raise ValueError(f"{wanted}, but returned a {type(returned).__name__} of shape {tuple(returned.shape)}")
    if (
        getattr(returned, "ndim", 1) == 0
        or isinstance(returned, (str, bytes, Mapping, set, frozenset))
        or not isinstance(returned, Iterable)
    ):
        raise ValueError(f"{wanted}, but returned {_described(returned)}")
    # no more is asked of an iterator than shows that it is too long
    values = (
        returned.tolist()
        if hasattr(returned, "tolist")
        else list(returned if hasattr(returned, "__len__") else islice(returned, rows + 1))
    )
    if len(values) != rows:
        raise ValueError(f"reward function {name} returned {len(values)} rewards for {rows} completions")
    return [_number(name, value, row) for row, value in enumerate(values)]


def _number(name: str, value: object, row: int) -> float | None:
    if value is None:
        return None
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nobody has awaited it
        raise ValueError(
            f"reward function {name} returned a coroutine for completion {row}: make the function async and await each of them"
        )
    number = _as_number(value)
    if not math.isfinite(number):
        raise ValueError(
            f"reward function {name} returned {_described(value)} for completion {row}; it must be a finite number or None"
        )
    return number


def finite_number(value: object, what: str) -> float:
    """`value` as a number; ValueError, which names `what`, unless it is a finite one."""
    number = _as_number(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {_described(value)}; it must be a finite number")
    return number


def _as_number(value: object) -> float:
    """NaN for what is none."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _described(value: object) -> str:
    kind = type(value).__name__
    return (
        f"{value}"
        if value is None or isinstance(value, float)
        else f"{kind} {in_a_line(value, 40)}"
        if isinstance(value, (bool, int, str, bytes))
        else f"a {kind}"
    )
