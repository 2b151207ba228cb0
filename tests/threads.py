"""Runs the same work with several numbers of threads."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


def on_threads(work: Callable[[], Any], counts: Iterable[int] = (1, 2, 3)) -> list[Any]:
    """Return the result of `work()` for each number of threads. Restore torch's number of threads afterwards."""
    before, found = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(work())
    finally:
        torch.set_num_threads(before)
    return found
