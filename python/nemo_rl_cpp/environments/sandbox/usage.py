"""What a tree of processes makes the system hold at this moment, read from /proc.

Counted are: pages of no file (also those swapped out, and huge pages), page tables, kernel stacks, mappings, and for each
descriptor what a pipe or a socket behind it can hold at most: only a process inside can see how full it is. Pages that
processes share with files are not theirs. Shared memory and files of the program's folder are not seen here: the
process that watches from inside counts those (`supervisor`).
"""

import os
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl_cpp.environments.sandbox import kernel
from nemo_rl_cpp.environments.sandbox.limits import DESCRIPTORS

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024
_PIPE_KB = 16 * _PAGE_KB  # what a pipe holds, and its size cannot be changed
_THREAD_KB = 32  # kernel stack and what else belongs to a thread
_MAPPING_KB = 0.5
_IN_STATUS = ("VmSwap", "VmPTE", "HugetlbPages")
_SLOW_EVERY = 4  # looks: what takes many calls to change is read more seldom


class _Opened(NamedTuple):
    """What a descriptor is open on. Not its name: one name may have stood for many pipes, one after the other."""

    is_socket: bool
    device: int
    inode: int


@dataclass
class Usage:
    """memory_mb: of all processes; pids: the processes, threads: the threads of all of them, by their numbers here."""

    memory_mb: float = 0.0
    pids: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class Meter:
    """Adds up what is used by all processes that descend from `root`, itself left out. Those that end meanwhile do not count."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._slow: dict[int, tuple[float, set[_Opened]]] = {}  # process -> kB, what its descriptors stand for
        self._looks = 0
        one, other = socket.socketpair()
        with one, other:
            # what has been sent and not been read, and one more message, which may begin below the limit and end above
            self._socket_kb = 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) / 1024

    def look(self, limit_mb: float) -> Usage:
        """What is used; memory that processes have in common counts once where it matters, which is above `limit_mb`."""
        usage, private_kb, other_kb = Usage(), 0.0, 0.0
        opened: set[_Opened] = set()
        if self._looks % _SLOW_EVERY == 0:
            self._slow.clear()
        self._looks += 1
        for pid in _descendants(self.root):
            threads = _entries(f"/proc/{pid}/task")
            usage.pids.append(pid)
            usage.threads += map(int, threads)
            private_kb += next((size for thread in threads if (size := _private_kb(pid, thread))), 0.0)
            if pid not in self._slow:
                self._slow[pid] = (
                    _mappings_kb(pid, threads),
                    set().union(*(_open_files(pid, thread) for thread in threads)),
                )
            other_kb += _THREAD_KB * len(threads) + _status_kb(pid, threads) + self._slow[pid][0]
            opened |= self._slow[pid][1]
        sockets = sum(one.is_socket for one in opened)
        other_kb += sockets * self._socket_kb + (len(opened) - sockets) * _PIPE_KB
        if private_kb + other_kb > 1024 * limit_mb and len(usage.pids) > 1:
            private_kb = min(private_kb, _common_once_kb(usage.pids, 1024 * limit_mb - other_kb))
        usage.memory_mb = (private_kb + other_kb) / 1024
        return usage


def _descendants(pid: int) -> Iterator[int]:
    waiting, seen = [pid], {pid}
    while waiting:
        parent = waiting.pop()
        for thread in _entries(f"/proc/{parent}/task"):
            try:
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = set(map(int, file.read().split())) - seen
            except OSError:
                continue
            seen |= children
            waiting += children
            yield from children


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _private_kb(pid: int, thread: str) -> float:
    """Pages of no file; 0 for a thread that has ended: the first one may have, while others go on."""
    try:
        with open(f"/proc/{pid}/task/{thread}/statm", "rb") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * _PAGE_KB
    except (OSError, IndexError):
        return 0.0


def _status_kb(pid: int, threads: list[str]) -> float:
    """Swapped and huge pages, and page tables."""
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/status") as status:
                lines = (line.partition(":") for line in status)
                found = [int(value.split()[0]) for name, _, value in lines if name in _IN_STATUS]
        except OSError:
            continue
        if found:  # the first thread may have ended
            return sum(found)
    return 0.0


def _mappings_kb(pid: int, threads: list[str]) -> float:
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/maps", "rb") as maps:
                if count := maps.read().count(b"\n"):
                    return _MAPPING_KB * count
        except OSError:
            continue
    return 0.0


def _open_files(pid: int, thread: str) -> set[_Opened]:
    """What the descriptors of a thread are open on; threads need not have the same."""
    folder = f"/proc/{pid}/task/{thread}/fd"
    found = set()
    try:
        for name in os.listdir(folder):
            try:
                what = os.stat(f"{folder}/{name}")
                found.add(_Opened(stat.S_ISSOCK(what.st_mode), what.st_dev, what.st_ino))
            except FileNotFoundError:
                pass  # closed meanwhile
    except PermissionError:  # they are hidden: as many as there may be, of the kind that holds most
        number = int(thread)
        return (
            {_Opened(True, -1, number * DESCRIPTORS + which) for which in range(DESCRIPTORS)}
            if _private_kb(pid, thread)
            else set()
        )
    except OSError:
        pass  # the thread has ended
    return found


def _common_once_kb(pids: list[int], limit_kb: float) -> float:
    """Pages of no file, each counted once. The processes stand still meanwhile, and go on only when that is within the limit."""
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    # between a `vfork` and the `exec` that follows a process has the memory of another one
    distinct = [pid for at, pid in enumerate(pids) if not any(kernel.have_one_memory(pid, one) for one in pids[:at])]
    size = sum(map(_proportional_kb, distinct))
    if size <= limit_kb:
        for pid in pids:
            _signal(pid, signal.SIGCONT)
    return size


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _proportional_kb(pid: int) -> float:
    """Pages of no file, those in several processes divided among them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(float(line.split()[1]) for line in file if line.startswith("Pss_Anon:"))
    except PermissionError:
        return float("inf")
    except (OSError, StopIteration):  # it has ended
        return 0.0
