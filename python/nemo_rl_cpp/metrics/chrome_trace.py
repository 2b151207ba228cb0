"""A timeline of a run that chrome://tracing and ui.perfetto.dev show: which stage ran when, and how many cores it kept busy."""

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_cpp.metrics.memory import GIB, rss_bytes

_END = b"\n]\n"


class ChromeTrace:
    """Writes the stages of a `Timer` to a file in Chrome's trace event format; `timer.subscribe(ChromeTrace(path))` follows them.

    Every stage becomes one event on the line of its thread: when it began, how long it took, and in its arguments
    `busy_cores`, processor seconds of this process (all threads, no other process) for each second of the stage, and
    `rss_gb`, the memory in use at its end. The file is whole JSON after every event, so a run that is killed leaves a timeline.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, path: str | Path, title: str = "nemo_rl_cpp") -> None:
        """`title`: what the viewer calls this process. An older file at `path` is replaced."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        self._epoch = time.time() - time.perf_counter()  # a monotonic clock, so that a step takes what it takes
        self._lock = threading.Lock()
        self._running: dict[tuple[int, str], tuple[float, float]] = {}
        name = {"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": title}}
        self.path.write_bytes(b"[\n" + json.dumps(name).encode() + _END)

    def stage_started(self, label: str, depth: int) -> None:
        self._running[threading.get_ident(), label] = (time.perf_counter(), time.process_time())

    def stage_stopped(self, label: str, depth: int) -> None:
        started = self._running.pop((threading.get_ident(), label), None)
        if started is None:
            return
        seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
        arguments = {
            "busy_cores": round(cpu / seconds, 2) if seconds > 0 else 0.0,
            "rss_gb": round(rss_bytes() / GIB, 3),
        }
        self._append(
            {"name": label, "ph": "X", "ts": round((self._epoch + started[0]) * 1e6), "dur": round(seconds * 1e6), "pid": self._pid,
             "tid": threading.get_native_id(), "args": arguments}
        )  # fmt: skip

    def _append(self, event: Mapping[str, object]) -> None:
        with self._lock, self.path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write(b",\n" + json.dumps(event).encode() + _END)
