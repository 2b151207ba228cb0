"""The log files metrics.jsonl, system.jsonl and hyperparams.json of a run. metrics.jsonl can be truncated to a step."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_cpp.config.access import to_json
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import LoggerInterface, Metrics, flatten_dict, prefixed

METRICS = "metrics.jsonl"
SYSTEM = "system.jsonl"
HYPERPARAMS = "hyperparams.json"


class JsonlLogger(LoggerInterface):
    """A backend that writes one line per call to metrics.jsonl: `{"step": 3, "train/loss": 0.1, ...}`, with sorted
    names.

    Non-finite values are written as strings. Metrics with a separate x axis (`step_metric`, such as GPU samples by
    second) are written to system.jsonl. Each line is one write, so a killed process leaves at most an incomplete last
    line, which readers skip. If the disk is full, lines are kept in memory and written with the next line.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._files: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        row = {"step": int(step)} | {name: to_json(flat[name]) for name in sorted(flat)}
        own_axis = step_metric is not None and step_metric in metrics
        self._append(SYSTEM if own_axis else METRICS, json.dumps(row, allow_nan=False))

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        write_atomic(self.log_dir / HYPERPARAMS, json.dumps(to_json(params), indent=1), durable=False)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Do nothing, because the rollout files of each step contain every value."""

    def flush(self) -> None:
        for name, descriptor in self._files.items():
            self._write(name, descriptor)
            os.fsync(descriptor)

    def finish(self) -> None:
        files, self._files = self._files, {}
        try:
            for name, descriptor in files.items():
                self._write(name, descriptor)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps, and incomplete lines, atomically. The other lines keep their exact bytes."""
        self.finish()
        path = self.log_dir / METRICS
        if not path.is_file():
            return

        def kept(line: bytes) -> bool:
            try:
                return line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                return False

        temporary = path.with_name(f".{path.name}.tmp")
        with open(path, "rb") as source, open(temporary, "wb") as target:
            target.writelines(line for line in source if kept(line))
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            path = self.log_dir / name
            content = path.read_bytes() if path.is_file() else b""
            if content and not content.endswith(b"\n"):  # an incomplete last line, which an interrupted write may leave
                os.truncate(path, content.rfind(b"\n") + 1)
            self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._waiting[name] = self._waiting.get(name, b"") + (line + "\n").encode()
        self._write(name, self._files[name])

    def _write(self, name: str, descriptor: int) -> None:
        while waiting := self._waiting.get(name):
            self._waiting[name] = waiting[os.write(descriptor, waiting) :]
