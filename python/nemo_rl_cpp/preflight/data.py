"""Checks of data sets, prompts and truths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """Findings about data sets, prompts and truths."""
    yield from ()
