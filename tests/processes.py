"""Processes of a run, read from /proc."""

import time
from pathlib import Path


def processes_inside() -> set[str]:
    """Return the pids of processes that run a program in a sandbox."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if b"/box/main.py" in (folder / "cmdline").read_bytes():
                    found.add(folder.name)
            except OSError:
                pass
    return found


def left_over() -> list[str]:
    """Return the pids of sandboxed programs that are left after 30 seconds; those of concurrent tests end sooner."""
    return wait_until_gone(processes_inside(), 30.0)


def children_of(pid: int) -> list[str]:
    """Return the pids of the child processes of all threads of a process."""
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def verifier_pids(owner) -> list[int]:
    """Return the pids of the workers of a VerifierPool, or of an environment that has one."""
    return [worker.pid for worker in getattr(owner, "_pool", owner)._workers]


def descendants(pid: int) -> set[str]:
    try:
        children = children_of(pid)
    except OSError:
        return set()
    return set(children).union(*(descendants(int(child)) for child in children))


def alive(pid: int | str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids, seconds: float = 20.0) -> list:
    """Wait at most `seconds` until the processes have ended. Return the pids of those that are still running."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]
