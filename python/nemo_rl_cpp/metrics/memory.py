"""Memory and GPU use: peaks per phase of the process and the GPU in use, and a thread that samples the machine's."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from nemo_rl_cpp.metrics.timer import TOTAL

if TYPE_CHECKING:
    from nemo_rl_cpp.loggers.interface import LoggerInterface

GIB = float(1 << 30)
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    return _kib(_STATUS, "VmRSS") * 1024


def peak_rss_bytes() -> int:
    """Return the peak resident memory in bytes since the process started or since `reset_peak_rss`."""
    return _kib(_STATUS, "VmHWM") * 1024


def _kib(path: Path, key: str) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{key}:")), 0)
    except OSError:
        return 0


def meminfo_bytes(key: str) -> int:
    """Return an entry of /proc/meminfo in bytes, such as MemTotal; 0 if the system does not report it."""
    return _kib(_MEMINFO, key) * 1024


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's memory limit, if any."""
    available = meminfo_bytes("MemAvailable")
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def reset_peak_rss() -> bool:
    """Begin a new measurement of `peak_rss_bytes`. Return False if the system does not allow this."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def startup_objects_frozen() -> Iterator[None]:
    """A context manager that excludes all existing objects from garbage collection, because scanning several hundred
    thousand of them takes 1 % of a small step. If the caller has already used `gc.freeze`, change nothing."""
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class PhaseMemory:
    """An observer, `timer.subscribe(PhaseMemory())`, that measures the peak memory of the whole run and of each phase.
    The phases are the timer's outermost stages, such as generation. If the system cannot reset its record of the peak,
    the value of a phase is the memory in use at its end."""

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
        """Return memory in GiB: `peak_rss_gb/<phase>` since the last call, the present `rss_gb`, `peak_rss_gb/run`
        since the start, and with a GPU `peak_gpu_gb/<phase>`. They are logged with the prefix `memory`."""
        self._fold()
        metrics = {f"peak_rss_gb/{label}": value / GIB for label, value in self.peak_bytes.items()}
        metrics |= {f"peak_gpu_gb/{label}": value / GIB for label, value in self.gpu_peak_bytes.items()}
        metrics |= {"rss_gb": rss_bytes() / GIB, "peak_rss_gb/run": self._run_peak / GIB}
        self.peak_bytes, self.gpu_peak_bytes = {}, {}
        return metrics

    def _fold(self) -> int:
        """Return the peak in bytes since the last call, and begin a new measurement. Raise the run's peak to this value
        if it is larger."""
        peak = peak_rss_bytes()
        self._run_peak = max(self._run_peak, peak)
        if self._can_reset:
            reset_peak_rss()
        return peak


def _cuda() -> ModuleType | None:
    """Return torch.cuda if torch is already imported and a GPU is in use, otherwise None."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    return torch.cuda if torch.cuda.is_initialized() else None


# ---- memory of the machine, sampled


_QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]


class RayGpuMonitorLogger:
    """A logger of `ray/node.0.gpu.<i>.util` (percent), `ray/node.0.gpu.<i>.mem_gb`, `ray/node.0.mem_gb` and
    `ray/node.0.mem_total_gb`. The x axis is `ray/ray_step`, the seconds since the start. The names are NeMo RL's; the
    values come from nvidia-smi and the operating system, not from Ray."""

    def __init__(
        self, collection_interval: float, flush_interval: float, parent_logger: "LoggerInterface | None" = None
    ) -> None:
        """Sample every `collection_interval` seconds, and log to `parent_logger` every `flush_interval` seconds."""
        self.collection_interval, self.flush_interval = float(collection_interval), float(flush_interval)
        self.parent_logger = parent_logger
        self.metrics_buffer: list[tuple[int, dict[str, float]]] = []  # seconds since the start, metrics
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def available(self) -> bool:
        """Return whether this machine has GPUs that nvidia-smi can query."""
        return shutil.which(_QUERY[0]) is not None and bool(self._gpu_metrics())

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="gpu-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self.flush()

    def flush(self) -> None:
        """Log the samples collected so far."""
        entries, self.metrics_buffer = self.metrics_buffer, []
        for step, metrics in entries if self.parent_logger is not None else ():
            row = metrics | {"ray/ray_step": step}
            self.parent_logger.log_metrics(row, step=step, prefix="ray", step_metric="ray/ray_step")

    def _loop(self) -> None:
        started = flushed = time.monotonic()
        while not self._stop.wait(self.collection_interval):
            now = time.monotonic()
            self.metrics_buffer.append((int(now - started), self._gpu_metrics() | _host_metrics()))
            if now - flushed >= self.flush_interval:
                self.flush()
                flushed = now

    def _gpu_metrics(self) -> dict[str, float]:
        try:
            text = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        return parse_gpu_table(text)


def parse_gpu_table(text: str) -> dict[str, float]:
    """Return the GPU metrics in `text`, lines of nvidia-smi with index, utilization in percent and used memory in MiB.
    Values that a line does not report are omitted."""
    metrics = {}
    for line in text.splitlines():
        index, utilization, used = (line.split(",") + ["", ""])[:3]
        for name, value, unit in (("util", utilization, 1.0), ("mem_gb", used, 1024.0)):
            try:
                metrics[f"node.0.gpu.{int(index)}.{name}"] = float(value) / unit
            except ValueError:
                continue
    return metrics


def _host_metrics() -> dict[str, float]:
    total, free = (meminfo_bytes(key) / GIB for key in ("MemTotal", "MemAvailable"))
    return {"node.0.mem_gb": total - free, "node.0.mem_total_gb": total}
