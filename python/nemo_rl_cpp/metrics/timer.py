"""The times of a training step's stages, the rates `performance/*` that follow from them, and the time limit of a run."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Self

TOTAL = "total_step_time"


class Timer:
    """A timer of named stages: `with timer("generation"): ...`, or `record`.

    If a label is measured several times, `sums` adds the times. `with timer.step(n) as timer:` begins a training step:
    it discards the previous step's times and measures `total_step_time`. Times are seconds of a monotonic clock. The
    timer is thread-safe; stages nest within each thread."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._accounted = 0.0  # total seconds of the step's outermost stages
        self._lock = threading.Lock()
        self._local = threading.local()
        self._observers: list[object] = []

    def record(self, label: str, elapsed: float) -> None:
        """Add `elapsed` seconds that the caller measured to the time of `label`. This method does not change
        `accounted_share`, which counts only stages of `time`."""
        with self._lock:
            self._times[label] = self._times.get(label, 0.0) + elapsed

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure the seconds of the `with` block, also if the block raises an exception."""
        stack = self._local.__dict__.setdefault("stack", [])
        depth, in_step = sum(other != TOTAL for other in stack), TOTAL in stack
        stack.append(label)
        self._tell("stage_started", label, depth)
        began = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - began
            stack.pop()
            self.record(label, elapsed)
            if in_step and depth == 0 and label != TOTAL:
                with self._lock:
                    self._accounted += elapsed
            self._tell("stage_stopped", label, depth)

    __call__ = time

    @contextmanager
    def step(self, step: int) -> Iterator[Self]:
        """Discard the times of the previous step, measure `total_step_time`, and yield this timer.

        The times can be read until the next step begins. Stages measured after the `with` block (validation, saving a
        checkpoint) belong to the same step."""
        with self._lock:
            self._times, self._accounted = {}, 0.0
        with self.time(TOTAL):
            yield self

    def sums(self) -> dict[str, float]:
        """Return {label: total seconds in this step}."""
        with self._lock:
            return dict(self._times)

    def step_timing_metrics(self) -> dict[str, float]:
        """Return the metrics `timing/train/*` of the step: the seconds of each label, and `accounted_share`, the share
        of the step's time that the outermost stages cover (1.0 if they cover all of it)."""
        metrics = self.sums()
        if TOTAL in metrics:
            metrics["accounted_share"] = min(self._accounted / metrics[TOTAL], 1.0) if metrics[TOTAL] > 0 else 1.0
        return metrics

    def subscribe(self, observer: object) -> None:
        """Call the observer's methods `stage_started(label, depth)` and `stage_stopped(label, depth)`, if they exist,
        at the beginning and the end of each stage.

        `depth` is the number of enclosing stages, not counting the step, so an outermost stage has depth 0."""
        self._observers.append(observer)

    def _tell(self, event: str, label: str, depth: int) -> None:
        for observer in self._observers:
            if (method := getattr(observer, event, None)) is not None:
                method(label, depth)


def convert_to_seconds(time_string: str) -> int:
    """Return the seconds of a duration `DD:HH:MM:SS`: 13500 for `00:03:45:00`."""
    days, hours, minutes, seconds = map(int, time_string.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class TimeoutChecker:
    """A checker of a run's time limit. It reports once that the run must save and end, when the duration `timeout`
    (`DD:HH:MM:SS`, None: no limit) since its creation is over, or when one more step as slow as the slowest would
    exceed the limit."""

    def __init__(self, timeout: str | None) -> None:
        self.limit = float("inf") if timeout is None else float(convert_to_seconds(timeout))
        self.start_time = time.monotonic()
        self._told = False
        self._slowest = 0.0
        self._step_began: float | None = None

    def check_save(self) -> bool:
        """Return True the first time that the run must save and end, otherwise False."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        due = not self._told and time.monotonic() - self.start_time + self._slowest >= self.limit
        self._told = self._told or due
        return due

    def mark_iteration(self) -> None:
        """Measure the duration of steps: called when the first step begins, and at the end of each step."""
        now = time.monotonic()
        if self._step_began is not None:
            self._slowest = max(self._slowest, now - self._step_began)
        self._step_began = now


# ---- rates


class Devices(NamedTuple):
    """Numbers of devices by which rates are divided: all, those that train, those that generate. A device is a GPU, or
    the CPU of one process."""

    total: int = 1
    training: int = 1
    generation: int = 1


ONE_DEVICE = Devices()


def performance_metrics(
    timing: Mapping[str, float], *, num_samples: int, total_num_tokens: float, num_generated_tokens: float | None = None,
    num_rollout_tokens: float | None = None, devices: Devices = ONE_DEVICE,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics `performance/*` of a step. Names that end in `_per_gpu` are rates per device that runs the
    stage; other names are rates of all devices together.

    A rate is a count divided by the seconds of a stage. `timing` has the seconds of each stage, under NeMo RL's labels.
    `total_num_tokens` counts the prompt and response tokens of the trained samples. As in NeMo RL, it is the numerator
    of every token rate except generation's, whose numerator is `num_rollout_tokens` (of all generated rollouts; None:
    nothing was generated). `decode_tokens_per_sec` is the rate of `num_generated_tokens` alone. Rates of stages that
    did not run are omitted."""
    step, generation = timing.get("total_step_time", 0.0), timing.get("generation", 0.0)
    training, logprobs = timing.get("policy_training", 0.0), timing.get("policy_and_reference_logprobs", 0.0)
    metrics: dict[str, float] = {}

    def rate(name: str, count: float, seconds: float, of: int, whole: bool = True) -> None:
        if seconds > 0:
            metrics[f"{name}_per_gpu"] = count / seconds / of
            if whole:
                metrics[name] = count / seconds

    rate("samples_per_sec", num_samples, step, devices.total)
    rate("tokens_per_sec", total_num_tokens, step, devices.total)
    if num_rollout_tokens is not None:
        rate("generation_tokens_per_sec", num_rollout_tokens, generation, devices.generation)
    rate("policy_training_tokens_per_sec", total_num_tokens, training, devices.training, whole=False)
    rate("policy_and_reference_logprobs_tokens_per_sec", total_num_tokens, logprobs, devices.training, whole=False)
    rate("training_worker_group_tokens_per_sec", total_num_tokens, training + logprobs, devices.training)
    if num_generated_tokens is not None and generation > 0:
        metrics["decode_tokens_per_sec"] = num_generated_tokens / generation
    return metrics
