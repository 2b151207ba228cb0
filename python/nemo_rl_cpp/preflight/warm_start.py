"""Checks that the critic's weights exist with which a fresh PPO run begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.master import PPOMasterConfig

from .finding import Finding

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import WholeConfig


def check(config: WholeConfig) -> Iterator[Finding]:
    """An error where `ppo.warm_start_value_checkpoint` names no critic; no error for a run that resumes from its own checkpoint."""
    checkpoint = config.ppo.warm_start_value_checkpoint if isinstance(config, PPOMasterConfig) else None
    if checkpoint is None or (Path(checkpoint).expanduser() / "value" / "weights").is_dir():
        return
    if config.checkpointing.enabled and any(Path(config.checkpointing.checkpoint_dir).expanduser().glob("step_*")):
        return
    yield Finding(
        "error",
        "ppo.warm_start_value_checkpoint",
        f"is {checkpoint}, which has no folder value/weights: name a folder step_N that a PPO run with a critic has saved, or write null",
    )
