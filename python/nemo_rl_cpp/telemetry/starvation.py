"""How much of their cores a process's threads get, and a sentence where other programs have them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_rl_cpp.threads import processors


@dataclass(frozen=True)
class CoreTime:
    """Seconds, of all threads of this process together since each began."""

    running: float  #: on a core
    waiting: float  #: ready to run, while other threads had the cores

    def __sub__(self, earlier: Self) -> Self:
        return CoreTime(max(0.0, self.running - earlier.running), max(0.0, self.waiting - earlier.waiting))


def core_time() -> CoreTime | None:
    """None where the system does not say (Linux does, in /proc)."""
    running = waiting = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            try:
                on_core, ready = (thread / "schedstat").read_text().split()[:2]
            except FileNotFoundError:  # it has just ended
                continue
            running, waiting = running + int(on_core), waiting + int(ready)
    except (OSError, ValueError):
        return None
    return CoreTime(running / 1e9, waiting / 1e9)


class StarvationWatch:
    """Says once that a run's threads wait for cores that other programs have."""

    def __init__(self, most: float = 0.25, least_seconds: float = 5.0) -> None:
        """`most`: share of their ready time that threads may wait unremarked. `least_seconds`: ready time that counts as proof."""
        self._most, self._least = most, least_seconds
        self._before = core_time()
        self._said = False

    def look(self) -> str | None:
        """What to say about the time since the last look that was long enough; None when there is nothing (new)."""
        now = core_time()
        if self._said or now is None or self._before is None:
            return None
        spent = now - self._before
        ready = spent.running + spent.waiting
        if ready < self._least:
            return None
        self._before = now
        if spent.waiting <= self._most * ready:
            return None
        self._said = True
        return starved_text(spent)


def starved_text(spent: CoreTime) -> str:
    """The sentence for the terminal."""
    share = 100 * spent.running / (spent.running + spent.waiting)
    count = processors()
    try:
        load = f", load {os.getloadavg()[0]:.1f}"
    except OSError:
        load = ""
    return (
        f"this machine is busy: the run's threads had a core for {share:.0f} % of the time that they wanted one ({count} "
        f"processor{'s' if count != 1 else ''}{load}). Steps take longer, results stay the same; end other programs, or give the run fewer "
        "threads (cluster.cpus_per_worker)"
    )
