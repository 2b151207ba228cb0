"""The memory of this machine."""

import os
from pathlib import Path


def machine_memory() -> float | None:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less. None: not known."""
    try:
        amounts = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    except (ValueError, OSError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            amounts.append(float(text))
    return min(amounts)


def swap_memory() -> float:
    """Bytes of this machine's swap; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:"))
