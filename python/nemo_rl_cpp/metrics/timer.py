"""Named stage times of a training step, and the wall-clock limit of a run."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

TOTAL = "total_step_time"


class Timer:
    """Measures named stages: `with timer("generation"): ...`, `timer.start(...)`/`timer.stop(...)`, or `record`.

    A label may be measured many times; `sums` adds up. `with timer.step(n) as timer:` begins a training step: it forgets the last
    step's times and measures `total_step_time`. Times are seconds of a monotonic clock. Safe to use from several threads (each has
    its own nesting).
    """

    def __init__(self) -> None:
        self._timers: dict[str, list[float]] = {}
        self._start_times: dict[str, float] = {}
        self._accounted = 0.0  # seconds of the outermost stages of a step; a stage inside another one is part of it
        self._lock = threading.RLock()
        self._local = threading.local()
        self._observers: list[object] = []
        self.current_step: int | None = None

    def start(self, label: str) -> None:
        """Starts `label`; ValueError when it is running already."""
        with self._lock:
            if label in self._start_times:
                raise ValueError(f"timer {label!r} is already running: stop it first, or use another label")
            self._start_times[label] = time.perf_counter()
        outer = self._outer_stages(label)
        self._stack().append(label)
        self._tell("stage_started", label, len(outer))

    def stop(self, label: str) -> float:
        """Stops `label` and returns the seconds since its start; ValueError when it is not running."""
        now = time.perf_counter()
        with self._lock:
            if label not in self._start_times:
                raise ValueError(f"timer {label!r} is not running; running: {sorted(self._start_times) or 'none'}")
            elapsed = now - self._start_times.pop(label)
            self._timers.setdefault(label, []).append(elapsed)
            stack, outer = self._stack(), self._outer_stages(label)
            if label != TOTAL and not outer and TOTAL in stack:
                self._accounted += elapsed
            if label in stack:
                stack.remove(label)
        self._tell("stage_stopped", label, len(outer))
        return elapsed

    def record(self, label: str, elapsed: float) -> None:
        """Adds a duration in seconds that the caller measured itself. It does not enter `accounted_share`."""
        with self._lock:
            self._timers.setdefault(label, []).append(elapsed)

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measures the block, also when it raises."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    __call__ = time

    @contextmanager
    def step(self, step: int) -> Iterator[Self]:
        """One training step: forgets the times of the one before, measures `total_step_time`, yields this timer.

        The times stay readable until the next step begins, and stages measured after the block (checkpointing,
        validation) still belong to it.
        """
        self.reset()
        self.current_step = step
        with self.time(TOTAL):
            yield self

    def sums(self) -> dict[str, float]:
        """The seconds of each label."""
        with self._lock:
            return {label: sum(values) for label, values in self._timers.items()}

    def step_timing_metrics(self) -> dict[str, float]:
        """The `timing/train/*` values of the step: `sums`, and `accounted_share` (1.0: every moment of the step belongs to a named
        stage), of the outermost stages."""
        metrics = self.sums()
        if TOTAL in metrics:
            metrics["accounted_share"] = min(self._accounted / metrics[TOTAL], 1.0) if metrics[TOTAL] > 0 else 1.0
        return metrics

    def subscribe(self, observer: object) -> None:
        """Calls `observer.stage_started(label, depth)` and `stage_stopped(label, depth)`, where it has them.

        `depth` counts the stages around this one, the step itself not counted: 0 is an outermost stage.
        """
        self._observers.append(observer)

    def reset(self) -> None:
        with self._lock:
            self._timers.clear()
            self._start_times.clear()
            self._stack().clear()
            self._accounted = 0.0

    def _stack(self) -> list[str]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def _outer_stages(self, label: str) -> list[str]:
        """The running stages of this thread around `label`, without the step itself."""
        stack = self._stack()
        around = stack[: stack.index(label)] if label in stack else stack
        return [other for other in around if other != TOTAL]

    def _tell(self, event: str, label: str, depth: int) -> None:
        for observer in self._observers:
            if (method := getattr(observer, event, None)) is not None:
                method(label, depth)


def convert_to_seconds(time_string: str) -> int:
    """Seconds of a duration written `DD:HH:MM:SS`, for example 13500 for `00:03:45:00`. ValueError otherwise."""
    parts = str(time_string).split(":")
    if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"{time_string!r} is not a duration of the form DD:HH:MM:SS, for example 00:03:45:00")
    days, hours, minutes, seconds = map(int, parts)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeoutChecker:
    """Says once when a run should save and end, because its time is up or the next step would not fit any more.

    `timeout` is `DD:HH:MM:SS` from the moment this object is made (`checkpointing.checkpoint_must_save_by`), None for
    no limit. With `fit_last_save_time` the slowest step seen so far must still fit before the limit.
    """

    def __init__(self, timeout: str | None = "00:03:45:00", fit_last_save_time: bool = False) -> None:
        self.last_save_time = float("inf") if timeout is None else float(convert_to_seconds(timeout))
        self.fit_last_save_time = fit_last_save_time
        self.start_time = time.monotonic()
        self.last_saved = False
        self.iteration_times: list[float] = []
        self.previous_iteration_time: float | None = None

    def would_save(self, extra_s: float = 0.0) -> bool:
        """Like `check_save`, without using up the answer. `extra_s`: seconds the next step needs beyond the slowest."""
        if self.last_saved:
            return False
        elapsed = time.monotonic() - self.start_time
        if self.fit_last_save_time and self.iteration_times:
            elapsed += max(self.iteration_times) + max(extra_s, 0.0)
        return elapsed >= self.last_save_time

    def check_save(self, extra_s: float = 0.0) -> bool:
        """True exactly once: when the limit is reached."""
        sys.stdout.flush()
        sys.stderr.flush()
        due = self.would_save(extra_s)
        self.last_saved = self.last_saved or due
        return due

    def start_iterations(self) -> None:
        self.previous_iteration_time = time.monotonic()

    def mark_iteration(self) -> None:
        now = time.monotonic()
        if self.previous_iteration_time is not None:
            self.iteration_times.append(now - self.previous_iteration_time)
        self.previous_iteration_time = now
