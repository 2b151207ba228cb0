"""Peak memory by phase: of the process (resident set), and of the GPU where one is in use; and what the garbage collector searches."""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from nemo_rl_cpp.metrics.timer import TOTAL

GIB = float(1 << 30)
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    value = _status_bytes("VmRSS")
    return value if value is not None else _max_rss()


def peak_rss_bytes() -> int:
    """The highest resident memory since the start, or since `reset_peak_rss`, in bytes."""
    value = _status_bytes("VmHWM")
    return value if value is not None else _max_rss()


def available_bytes() -> int:
    """Memory that can still be taken without swapping: this machine's, or less in a container with a limit."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def reset_peak_rss() -> bool:
    """Makes `peak_rss_bytes` begin again from now; False where the system does not allow it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def startup_objects_frozen() -> Iterator[None]:
    """The garbage collector leaves what exists now alone until the end: modules and tables, some hundred thousand objects
    that live as long as the run. To search them again and again takes 1 % of a small step. A caller's own `gc.freeze` stays."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class PhaseMemory:
    """Peak memory of each phase and of the whole run; `timer.subscribe(PhaseMemory())` follows the outermost stages.

    Where the peak cannot be reset (other systems than Linux) a phase reports the memory in use at its end.
    """

    def __init__(self) -> None:
        self.peak_bytes: dict[str, int] = {}
        self.gpu_peak_bytes: dict[str, int] = {}
        self._run_peak = peak_rss_bytes()
        self._can_reset = reset_peak_rss()

    def stage_started(self, label: str, depth: int) -> None:
        if depth == 0 and label != TOTAL:
            self._fold()
            if (cuda := _cuda()) is not None:
                cuda.reset_peak_memory_stats()

    def stage_stopped(self, label: str, depth: int) -> None:
        if depth != 0 or label == TOTAL:
            return
        peak = self._fold() if self._can_reset else rss_bytes()
        self.peak_bytes[label] = max(self.peak_bytes.get(label, 0), peak)
        if (cuda := _cuda()) is not None:
            self.gpu_peak_bytes[label] = max(self.gpu_peak_bytes.get(label, 0), cuda.max_memory_allocated())

    def step_metrics(self) -> dict[str, float]:
        """GiB: `peak_rss_gb/<phase>` since the last call, `rss_gb` now, `peak_rss_gb/run` since the start; with a GPU
        also `peak_gpu_gb/<phase>`. Log them with the prefix `memory`."""
        self._fold()
        metrics = {f"peak_rss_gb/{label}": value / GIB for label, value in self.peak_bytes.items()}
        metrics |= {f"peak_gpu_gb/{label}": value / GIB for label, value in self.gpu_peak_bytes.items()}
        metrics |= {"rss_gb": rss_bytes() / GIB, "peak_rss_gb/run": self._run_peak / GIB}
        self.peak_bytes, self.gpu_peak_bytes = {}, {}
        return metrics

    def _fold(self) -> int:
        """The peak since the last fold; it enters the run's peak and is reset."""
        peak = peak_rss_bytes()
        self._run_peak = max(self._run_peak, peak)
        if self._can_reset:
            reset_peak_rss()
        return peak


def _status_bytes(key: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cuda() -> ModuleType | None:
    """torch.cuda when torch is loaded and has a GPU in use; torch is never imported for this."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    return torch.cuda if torch.cuda.is_initialized() else None
