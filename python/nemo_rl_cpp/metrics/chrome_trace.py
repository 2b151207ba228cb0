"""A timeline of a run for chrome://tracing and ui.perfetto.dev: when each stage ran, and how many cores were busy."""

import json
import os
import threading
import time
from pathlib import Path

from nemo_rl_cpp.metrics.memory import GIB, rss_bytes

_END = b"\n]\n"


class ChromeTrace:
    """An observer that writes the stages of a `Timer` to a file in Chrome's trace event format:
    `timer.subscribe(ChromeTrace(path))`.

    Each stage is an event in the row of its thread, with start and duration. Its arguments are `busy_cores`, the
    process's CPU seconds per second of the stage, and `rss_gb`, the resident memory at the end of the stage. The file
    is complete JSON after every event, so a killed run leaves a usable timeline. An existing file is replaced. Raises
    OSError."""

    def __init__(self, path: str | Path, title: str = "nemo_rl_cpp") -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._epoch = time.time() - time.perf_counter()  # time of day minus the monotonic clock
        self._lock = threading.Lock()
        self._running: dict[tuple[int, str], tuple[float, float]] = {}
        name = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": title}}
        self.path.write_bytes(b"[\n" + json.dumps(name).encode() + _END)

    def stage_started(self, label: str, depth: int) -> None:
        self._running[threading.get_ident(), label] = (time.perf_counter(), time.process_time())

    def stage_stopped(self, label: str, depth: int) -> None:
        began, cpu = self._running.pop((threading.get_ident(), label), (None, 0.0))
        if began is None:
            return
        seconds = time.perf_counter() - began
        busy = (time.process_time() - cpu) / seconds if seconds > 0 else 0.0
        event = {
            "name": label,
            "ph": "X",
            "ts": round((self._epoch + began) * 1e6),
            "dur": round(seconds * 1e6),
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "args": {"busy_cores": round(busy, 2), "rss_gb": round(rss_bytes() / GIB, 3)},
        }
        with self._lock, self.path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write(b",\n" + json.dumps(event).encode() + _END)
