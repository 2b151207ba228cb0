"""Checks of the folders that a run writes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """Findings about the folders that a run writes to."""
    yield from ()
