"""NeMo RL's timer: the house's, with events, files, and the slowest of several workers."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_cpp.telemetry import timer as house
from nemo_rl_cpp.telemetry.timer import TimeoutChecker, convert_to_seconds


class Timer(house.Timer):
    """Measures named stages, see `nemo_rl_cpp.telemetry.timer.Timer`, and notes events."""

    def __init__(self, context: dict[str, object] | None = None) -> None:
        super().__init__(context)
        self._markers: dict[str, list[tuple[float, dict | None]]] = {}

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
        super().reset(label)
        self._markers.clear() if label is None else self._markers.pop(label, None)


ThreadSafeTimer = Timer
