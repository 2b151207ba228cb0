"""Measurements of a run's time and memory."""

from collections.abc import Callable


def extremum(name: str) -> Callable[..., float] | None:
    """Return the function that combines a metric's values of several micro-batches or ranks: `min` if its name ends in
    `_min`, `max` if it ends in `_max`, otherwise None."""
    return min if name.endswith("_min") else max if name.endswith("_max") else None
