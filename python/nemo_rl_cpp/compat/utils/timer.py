"""NeMo RL's timer: the house's, with events, files, and the slowest of several workers."""

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_cpp.telemetry import timer as house
from nemo_rl_cpp.telemetry.timer import TimeoutChecker, convert_to_seconds

_log = logging.getLogger(__name__)


class Timer(house.Timer):
    """Measures named stages, see `nemo_rl_cpp.telemetry.timer.Timer`, reduces measurements, and notes events."""

    _REDUCTION_FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean,
        "median": statistics.median,
        "min": min,
        "max": max,
        "std": statistics.pstdev,
        "sum": sum,
        "count": len,
    }

    def __init__(self, context: dict[str, object] | None = None) -> None:
        """`context` identifies this timer (rank, worker, ...) in its DEBUG log lines."""
        super().__init__()
        self._context = dict(context or {})
        self._markers: dict[str, list[tuple[float, dict | None]]] = {}

    def start(self, label: str, should_log: bool = True) -> None:
        """Starts `label`; ValueError when it is running already."""
        super().start(label)
        self._debug(should_log, label, "start")

    def stop(self, label: str, should_log: bool = True) -> float:
        """Stops `label` and returns the seconds since its start; ValueError when it is not running."""
        elapsed = super().stop(label)
        self._debug(should_log, label, f"end elapsed={elapsed:.4f}s")
        return elapsed

    def record(self, label: str, elapsed: float, should_log: bool = True) -> None:
        """Adds a duration in seconds that the caller measured itself."""
        super().record(label, elapsed)
        self._debug(should_log, label, f"record elapsed={elapsed:.4f}s")

    @contextmanager
    def time(self, label: str, should_log: bool = True) -> Iterator[None]:
        """Measures the block, also when it raises."""
        self.start(label, should_log)
        try:
            yield
        finally:
            self.stop(label, should_log)

    __call__ = time

    def get_elapsed(self, label: str) -> list[float]:
        """All measurements of `label`; KeyError when there are none."""
        with self._lock:
            if label not in self._timers:
                raise KeyError(f"no timings recorded for {label!r}")
            return self._timers[label]

    def reduce(self, label: str, operation: str = "mean") -> float:
        """One number for all measurements of `label`: mean, median, min, max, std (population), sum or count."""
        if operation not in self._REDUCTION_FUNCTIONS:
            raise ValueError(f"invalid operation {operation!r}: use one of {', '.join(self._REDUCTION_FUNCTIONS)}")
        return self._REDUCTION_FUNCTIONS[operation](self.get_elapsed(label))

    def get_timing_metrics(self, reduction_op: str | dict[str, str] = "mean") -> dict[str, float | list[float]]:
        """All labels, reduced by one operation, or each by its own (labels without one give their list)."""
        with self._lock:
            operations = dict.fromkeys(self._timers, reduction_op) if isinstance(reduction_op, str) else reduction_op
            return {
                label: self.reduce(label, operations[label]) if label in operations else list(values)
                for label, values in self._timers.items()
            }

    def _debug(self, should_log: bool, label: str, event: str) -> None:
        if should_log and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s %s ts=%.6f %s", label, event, time.time(), self._context)

    def mark(self, label: str, metadata: dict | None = None) -> float:
        """Notes that something happened now; returns the Unix time in seconds."""
        now = time.time()
        with self._lock:
            self._markers.setdefault(label, []).append((now, metadata))
        self._debug(True, label, f"mark meta={metadata}" if metadata else "mark")
        return now

    def get_markers(self, label: str | None = None) -> dict[str, list[tuple[float, dict | None]]]:
        """All marks by label, or only those of `label`."""
        with self._lock:
            labels = self._markers if label is None else [label]
            return {name: list(self._markers.get(name, [])) for name in labels}

    def get_latest_elapsed(self, label: str) -> float:
        """The newest measurement of `label`; KeyError when there is none."""
        return self.get_elapsed(label)[-1]

    def save_to_json(
        self, filepath: str | Path, reduction_op: str = "sum", metadata: dict[str, Any] | None = None
    ) -> None:
        """Writes {"timings": {label: seconds}, "reduction_op", "metadata" if given}; makes the folders above the file."""
        content: dict[str, Any] = {"timings": self.get_timing_metrics(reduction_op), "reduction_op": reduction_op}
        if metadata:
            content["metadata"] = metadata
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")

    @staticmethod
    def aggregate_max(timers: Sequence["Timer"], reduction_op: str = "sum") -> dict[str, float]:
        """By label, the largest reduced time over several timers: the slowest worker decides how long a stage takes."""
        slowest: dict[str, float] = {}
        for timer in timers:
            for label, elapsed in timer.get_timing_metrics(reduction_op).items():
                slowest[label] = max(elapsed, slowest.get(label, elapsed))
        return slowest

    def reset(self, label: str | None = None) -> None:
        """Forgets one label, or everything."""
        if label is None:
            super().reset()
            self._markers.clear()
            return
        with self._lock:
            for store in (self._timers, self._start_times, self._markers):
                store.pop(label, None)
            stack = self._stack()
            stack[:] = [other for other in stack if other != label]


ThreadSafeTimer = Timer
