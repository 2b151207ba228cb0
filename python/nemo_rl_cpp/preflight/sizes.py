"""Sizes and engines that a file was written for, and whether this machine can hold what they run on here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_rl_cpp.config.fold import fold_text
from nemo_rl_cpp.config.memory import certain_bytes, machine_memory, readable_bytes

from .finding import Finding


def check(config: Any) -> Iterator[Finding]:
    """The one line about what was folded, and an error where weights and optimizer alone are more than the machine's memory."""
    text = fold_text(config)
    if text is not None:
        yield Finding("warning", "", text)
    if not hasattr(config, "policy") or config.cluster.device != "cpu":
        return
    needed, machine = certain_bytes(config), machine_memory()
    if needed is not None and machine is not None and needed > machine:
        yield Finding(
            "error",
            "policy.model_name",
            f"is {config.policy.model_name}, whose weights, gradients and optimizer alone take {readable_bytes(needed)}, but this machine "
            f"has {readable_bytes(machine)} of memory and swap; take a smaller model or a larger machine (--dry-run shows the forecast)",
        )
