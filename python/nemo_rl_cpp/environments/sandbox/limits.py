"""How much a program may use."""

import os
import resource
from dataclasses import dataclass

DESCRIPTORS = 32
"""Open files: the pipes and sockets among them hold 12 MB at most."""
_INTERPRETER_MB = 32
_MB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one run of one program, which is one process.

    Attributes:
        time_s: wall-clock seconds; processor time is limited to as much.
        memory_mb: address space and folder together. The kernel keeps this limit itself: the folder has `folder_mb`, the
            address space the rest.
        threads: threads at the same time.
        output_kb: what it may write to standard output and standard error.
        folder_mb: size of its folder, which lies in memory.
    """

    time_s: float = 5.0
    memory_mb: int = 512
    threads: int = 8
    output_kb: int = 1024
    folder_mb: int = 32

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_mb", "threads", "output_kb", "folder_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.memory_mb < self.folder_mb + _INTERPRETER_MB:
            needed = f"{self.folder_mb + _INTERPRETER_MB}: folder_mb, and {_INTERPRETER_MB} for a Python interpreter"
            raise ValueError(f"memory_mb is {self.memory_mb}; the least is {needed}")

    def apply(self, other_processes: int = 0) -> None:
        """Sets the kernel's limits of the calling process, all but that of memory. They cannot be raised again.

        `other_processes`: of the same user that are not the program's.
        """
        cpu = int(self.time_s) + 1
        hard = {
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_NPROC: self.threads + other_processes,
            resource.RLIMIT_FSIZE: self.folder_mb * _MB,
            resource.RLIMIT_NOFILE: DESCRIPTORS,
            resource.RLIMIT_SIGPENDING: 1024,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for kind, limit in hard.items():
            _lower(kind, limit)
        os.nice(5)  # the run's own work goes first

    def apply_memory(self) -> None:
        """The same for address space: right before exec, since the calling process may be larger than its program may be."""
        _lower(resource.RLIMIT_AS, (self.memory_mb - self.folder_mb) * _MB)


def _lower(kind: int, limit: int) -> None:
    _, most = resource.getrlimit(kind)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, limit))
