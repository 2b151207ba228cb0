"""What a run costs: time, memory, and how informative its batches were."""

from collections.abc import Callable


def extremum(name: str) -> Callable[..., float] | None:
    """Return `min` or `max` for a metric that is an extremum by its name (`_min`, `_max` at the end), else None."""
    return min if name.endswith("_min") else max if name.endswith("_max") else None
