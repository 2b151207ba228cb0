"""A thread that samples GPU and host memory usage periodically."""

import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_cpp.loggers.interface import LoggerBackend

_QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]


class RayGpuMonitorLogger:
    """A logger of `ray/node.0.gpu.<i>.util` (percent), `ray/node.0.gpu.<i>.mem_gb`, `ray/node.0.mem_gb` and
    `ray/node.0.mem_total_gb`. The x axis is `ray/ray_step`, the seconds since the start. The names are NeMo RL's; the
    values come from nvidia-smi and the operating system, not from Ray.
    """

    def __init__(
        self, collection_interval: float, flush_interval: float, parent_logger: "LoggerBackend | None" = None
    ) -> None:
        """Sample every `collection_interval` seconds, and log to `parent_logger` every `flush_interval` seconds. Raise
        ValueError unless both are positive.
        """
        if collection_interval <= 0 or flush_interval <= 0:
            raise ValueError("logger.gpu_monitoring: collection_interval and flush_interval must be positive seconds")
        self.collection_interval, self.flush_interval = float(collection_interval), float(flush_interval)
        self.parent_logger = parent_logger
        self.metrics_buffer: list[tuple[int, dict[str, float]]] = []  # seconds since the start, metrics
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def available(self) -> bool:
        """Whether this machine has GPUs that can be queried."""
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
    """Return the metrics from nvidia-smi's lines `index, utilization in percent, used MiB`. Values that a line does not
    report are omitted.
    """
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
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
    total, free = kib["MemTotal"] / (1 << 20), kib["MemAvailable"] / (1 << 20)
    return {"node.0.mem_gb": total - free, "node.0.mem_total_gb": total}
