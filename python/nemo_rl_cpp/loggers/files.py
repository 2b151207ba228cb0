"""Logs that are files of the run: metrics.jsonl, system.jsonl, TensorBoard events.

All of them can be cut back to a step, so that a run that resumes from the checkpoint of that step leaves the same files
as one that was never interrupted (but for times).
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from nemo_rl_cpp.config.access import to_json, to_plain
from nemo_rl_cpp.config.base import read_section
from nemo_rl_cpp.config.logger import TensorboardConfig
from nemo_rl_cpp.files.durable import own_copy, read_text, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers import tb_events
from nemo_rl_cpp.loggers.interface import LoggerInterface, flatten_dict, prefixed, scalar_of

METRICS = "metrics.jsonl"
SYSTEM = "system.jsonl"
HYPERPARAMS = "hyperparams.json"
# never through a link to elsewhere, never into a fifo, which would wait
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class JsonlLogger(LoggerInterface):
    """One line a call in metrics.jsonl: `{"step": 3, "train/loss": 0.1, ...}`, names sorted, non-finite values as strings.

    Metrics with an x axis of their own (`step_metric`, such as GPU samples by second) go to system.jsonl instead. A line
    is one write, so a killed process leaves at most the last line torn; readers skip such a line. What a full disk does
    not take waits in memory for the next line.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._files: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Appends one line."""
        flat = flatten_dict(prefixed(metrics, prefix, step_metric), sep="/", expand_lists=False)
        row = {"step": int(step)} | {name: to_json(flat[name]) for name in sorted(flat)}
        own_axis = step_metric is not None and step_metric in metrics
        self._append(SYSTEM if own_axis else METRICS, json.dumps(row, allow_nan=False))

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Writes hyperparams.json."""
        write_atomic(self.log_dir / HYPERPARAMS, json.dumps(to_json(params), indent=1), durable=False)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Nothing: the per-step rollout files hold every value."""

    def flush(self) -> None:
        """Syncs the files to the disk."""
        for name, descriptor in self._files.items():
            self._write(name, descriptor)
            os.fsync(descriptor)

    def finish(self) -> None:
        """Closes the files; a later call opens them again."""
        files, self._files = self._files, {}
        try:
            for name, descriptor in files.items():
                self._write(name, descriptor)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Cuts metrics.jsonl back."""
        self.finish()
        truncate_jsonl(self.log_dir / METRICS, step)

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            path = self.log_dir / name
            own_copy(path)
            drop_torn_line(path)
            self._files[name] = os.open(path, _APPENDING, 0o666)
        self._waiting[name] = self._waiting.get(name, b"") + (line + "\n").encode()
        self._write(name, self._files[name])

    def _write(self, name: str, descriptor: int) -> None:
        while waiting := self._waiting.get(name):
            self._waiting[name] = waiting[os.write(descriptor, waiting) :]


class TensorboardLogger(LoggerInterface):
    """TensorBoard events (see `tb_events`): neither TensorBoard nor torch is needed to write them."""

    def __init__(self, cfg: TensorboardConfig | Mapping[str, object] | None, log_dir: str | Path | None = None) -> None:
        """`cfg`: `logger.tensorboard`; its `log_dir` wins over the argument. Several runs may share that folder: this one
        goes on in the event files that its own folder (the argument) lists, and leaves the others alone."""
        given = read_section(cfg or {}, TensorboardConfig).log_dir
        self.log_dir = str(given or log_dir or "tensorboard")
        self._list = Path(log_dir) / "event_files.txt" if given and log_dir else None
        self.writer = self._open()
        self._skipped: set[str] = set()

    def _open(self) -> tb_events.SummaryWriter:
        if self._list is None:
            return self.new_writer(log_dir=self.log_dir)
        own = self._own_files()
        writer = self.new_writer(log_dir=self.log_dir, own_files=own)
        if writer.path.name not in own:
            write_atomic(self._list, "".join(f"{name}\n" for name in [*own, writer.path.name]))
        return writer

    new_writer: Callable[..., tb_events.SummaryWriter] = staticmethod(tb_events.SummaryWriter)

    def _own_files(self) -> list[str]:
        if self._list is None:
            return [path.name for path in Path(self.log_dir).glob(tb_events.PATTERN)]
        listed = read_text(self._list).split() if self._list.is_file() else []
        return [name for name in listed if fnmatch(name, tb_events.PATTERN) and "/" not in name]

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Adds a scalar for every number; other values are skipped, with one message a name."""
        for name, value in flatten_dict(prefixed(metrics, prefix, None), sep="/", expand_lists=False).items():
            number = scalar_of(value)
            if number is not None and not isinstance(number, str):
                self.writer.add_scalar(name, number, step)
            # texts, such as digests, are in metrics.jsonl
            elif name not in self._skipped and not isinstance(value, str):
                self._skipped.add(name)
                print(f"TensorBoard: {name} is not logged, because it is a {type(value).__name__} and not a number")

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Adds the flattened configuration as text."""
        self.writer.add_hparams(flatten_dict(to_plain(params)), {})

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Adds a histogram of the finite values."""
        values = np.asarray(to_plain(histogram), dtype=np.float64).ravel()
        values = values[np.isfinite(values)]
        if values.size:
            self.writer.add_histogram(name, values.tolist(), step)

    def flush(self) -> None:
        """Syncs the event file to the disk."""
        self.writer.flush()

    def finish(self) -> None:
        """Closes the event file."""
        self.writer.close()

    def truncate_after(self, step: int) -> None:
        """Removes the events of later steps from all event files of the run."""
        self.writer.close()
        for path in (Path(self.log_dir) / name for name in self._own_files()):
            if path.is_file():
                tb_events.truncate_events(path, step)
        self.writer = self._open()


def truncate_jsonl(path: Path, step: int) -> None:
    """Keeps the whole lines whose `step` is not later, unchanged byte for byte. Atomic."""
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


def drop_torn_line(path: Path) -> None:
    """Cuts off what follows the last newline: the rest of a write that a kill interrupted."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
