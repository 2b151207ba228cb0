"""Processes of a run, read from /proc."""

import time
from pathlib import Path


def processes_inside() -> set[str]:
    """Processes that run a sandbox's program."""
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
    """Those that stay: programs of other tests at the same time end within seconds."""
    return wait_until_gone(processes_inside(), 30.0)


def children_of(pid: int) -> list[str]:
    """Of all its threads."""
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def verifier_pids(owner) -> list[int]:
    """Of a VerifierPool, or of an environment that has one."""
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
    """Those that are still there after so long."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]
