"""Checks of what a run asks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_rl_cpp.config.memory import fit_text, fits, forecast

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """Findings about the memory that a training run needs."""
    if hasattr(config, "policy") and fits(config) is False:
        peak = max(phase.total for phase in forecast(config) or ()) / 1e9
        yield Finding("warning", "", f"the forecast of memory, {peak:.3g} GB at the peak, {fit_text(config)}")
