"""Finds mistakes before a model is loaded that would end the run later: in model files, data, folders and environments.

`nemo-rl-cpp check`, `--dry-run`, the run scripts and `train_grpo` all ask `preflight(config)`. A check is a function of the
configuration that yields `Finding`s; each file of this package holds the checks of one subject. No check loads weights or torch.
"""

from collections.abc import Callable, Iterable

from nemo_rl_cpp.config.master import WholeConfig

from . import components, data, environments, folders, model, sizes
from .banner import banner_lines
from .finding import Finding

CHECKS: tuple[Callable[[WholeConfig], Iterable[Finding]], ...] = (
    sizes.check, folders.check, model.check, environments.check, components.check, data.check,
)  # fmt: skip


def preflight(config: WholeConfig) -> list[Finding]:
    """All findings about a checked configuration (of GRPO, PPO or an evaluation), errors first."""
    found = [finding for check in CHECKS for finding in check(config)]
    return sorted(found, key=lambda finding: finding.level != "error")


__all__ = ["CHECKS", "Finding", "banner_lines", "preflight"]
