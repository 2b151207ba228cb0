"""Checks of the model's and tokenizer's files against what the native core computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """Findings about the model's and tokenizer's files against what the native core computes."""
    yield from ()
