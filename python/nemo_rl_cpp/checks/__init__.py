"""Checks that find, before a model is loaded, what would make a run fail later: in model files, data and folders.

`nemo-rl-cpp check`, `--dry-run`, the run scripts and `train_grpo` all call `preflight(config)`. Each module of this
package checks one subject, with functions of the configuration. No check loads weights or torch."""

from nemo_rl_cpp.config.master import WholeConfig
from nemo_rl_cpp.errors import Finding

from . import data, folders, model
from .banner import banner_lines, has_time_forecast


def preflight(config: WholeConfig) -> list[Finding]:
    """Return all problems with the configuration of a training run or an evaluation, errors first."""
    checks = (model.check_memory, folders.check, model.check, data.check_environments, data.check)
    found = [finding for check in checks for finding in check(config)]
    return sorted(found, key=lambda finding: finding.level != "error")


__all__ = ["Finding", "banner_lines", "has_time_forecast", "preflight"]
