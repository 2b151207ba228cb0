"""What a tree of processes uses at this moment, read from /proc."""

import os
from typing import NamedTuple

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


class Usage(NamedTuple):
    """memory_mb: memory that is no file's, of all processes; threads: how many, of all processes."""

    memory_mb: float
    threads: int


def usage_below(pid: int) -> Usage:
    """Of all processes that descend from `pid`, itself left out. Those that end meanwhile do not count."""
    memory, threads = 0.0, 0
    waiting, seen = _children(pid), set()
    while waiting:
        child = waiting.pop()
        if child in seen:
            continue
        seen.add(child)
        try:
            with open(f"/proc/{child}/statm") as file:
                fields = file.read().split()
            memory += (int(fields[1]) - int(fields[2])) * _PAGE_MB  # resident, less what it shares with files
            threads += len(os.listdir(f"/proc/{child}/task"))
        except (OSError, IndexError):
            continue
        waiting += _children(child)
    return Usage(memory, threads)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found
