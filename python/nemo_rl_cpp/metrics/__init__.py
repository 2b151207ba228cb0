"""Metrics of a run: its time and memory, and how informative its batches were."""

from collections.abc import Callable


def extremum(name: str) -> Callable[..., float] | None:
    """Return `min` or `max` if the metric's name ends in `_min` or `_max`, otherwise None."""
    return min if name.endswith("_min") else max if name.endswith("_max") else None
