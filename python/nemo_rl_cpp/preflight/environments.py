"""Checks of environments and reward functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """Findings about environments and reward functions."""
    yield from ()
