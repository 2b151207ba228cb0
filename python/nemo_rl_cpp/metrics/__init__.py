"""Metrics of a run: its time and memory, and how informative its batches were."""

from collections.abc import Callable


def extremum(name: str) -> Callable[..., float] | None:
    """Return the function `min` or `max` by which a metric is combined if its name ends in `_min` or `_max`, otherwise
    None."""
    return min if name.endswith("_min") else max if name.endswith("_max") else None
