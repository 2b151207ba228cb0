"""Metrics of a run: its time and memory, and how informative its batches were."""

from collections.abc import Callable


def extremum(name: str) -> Callable[..., float] | None:
    """Return `min` for a metric whose name ends in `_min`, `max` for one in `_max`, otherwise None: the function that
    combines the metric's values of several micro-batches or ranks."""
    return min if name.endswith("_min") else max if name.endswith("_max") else None
