"""The number of compute threads, and how long they spin while they wait. Nothing in this module loads torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

SPIN_COUNT = 2000
"""Number of spins after which a waiting libgomp thread sleeps: some ten microseconds, about as long as waking it takes.
libgomp's default of 300,000 spins takes milliseconds. On a machine shared with other programs, the awaited thread often
has no core, and the spinning thread occupies a core that it could use."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set GOMP_SPINCOUNT, which limits how long waiting OpenMP threads occupy a core, for this process and its
    children, unless this variable or OMP_WAIT_POLICY is set. Return whether it was set in time for this process:
    libgomp reads the variable when `import torch` loads libgomp."""
    if "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment:
        return False
    environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return "torch" not in sys.modules


def cores() -> int:
    """Return the number of physical cores that this process may use. torch uses as many threads by default, because two
    logical processors may share the arithmetic units of a core."""
    found = set()
    for number in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", encoding="ascii") as file:
                found.add(file.read().strip())
        except OSError:
            found.add(str(number))
    return len(found)


def threads_at_start(asked: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of threads of a run: `asked` if given, otherwise OMP_NUM_THREADS or the number of cores."""
    given = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return asked or (int(given) if given.isdigit() and int(given) > 0 else cores())
