"""How many ranks `torchrun` or `srun` has started, as the environment variables of this process say."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class LauncherVariables(NamedTuple):
    """The variables that tell a process its rank and how many ranks there are."""

    rank: str
    size: str


def launcher_variables(environment: Mapping[str, str] = os.environ) -> LauncherVariables | None:
    """Those of torchrun, else of a step of srun; None where nobody has launched this process. The script of a Slurm job itself is no
    step."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return LauncherVariables("RANK", "WORLD_SIZE")
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    return LauncherVariables(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many; 1 where nobody has launched several, and where the variables are no numbers, which `distributed.launch.launched`
    reports."""
    variables = launcher_variables(environment)
    size = "" if variables is None else environment.get(variables.size, "")
    return max(int(size), 1) if size.isdecimal() else 1
