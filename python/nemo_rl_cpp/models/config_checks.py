"""Checks of values in a model's config.json."""

from typing import TypeGuard

from nemo_rl_cpp.hub.sources import ModelFolderError


def expect(is_valid: object, key: str, value: object, expected: str) -> None:
    """Raise ModelFolderError with the `key`, its `value` and what was `expected`, unless the value is valid."""
    if not is_valid:
        raise ModelFolderError(f"{key} is {value!r}, but {expected} was expected")


def is_whole(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_size(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer above 0 that the native core can hold."""
    return is_whole(value, 1) and value < 2**31


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number above 0."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1e300
