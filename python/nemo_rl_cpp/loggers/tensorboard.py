"""TensorBoard events of a run. They can be truncated to a step."""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import make_histogram, text

from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.logger import TensorboardConfig
from nemo_rl_cpp.files.durable import fsync_path, writable
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import LoggerInterface, Metrics, flatten_dict, prefixed, scalar_of

PATTERN = "events.out.tfevents.*"


class TensorboardLogger(LoggerInterface):
    """A backend that appends TensorBoard events to the run's newest event file, or creates one. It needs neither
    TensorBoard nor torch.

    It replaces tensorboardX's writer, whose queue is not emptied by `flush`: after a kill following `flush`, a file had
    94 of 100 events. This class writes each event at once, and a resumed run continues in the same file. A record is:
    length u64, masked CRC-32C of the length, `Event` message, masked CRC-32C of the message."""

    def __init__(self, cfg: TensorboardConfig | Mapping[str, object] | None, log_dir: str | Path | None = None) -> None:
        """Open the event file in `cfg.log_dir`, otherwise in `log_dir`. In `cfg.log_dir`, which runs may share, the
        names of event files end in the name of the run's log folder."""
        given = as_model(cfg or {}, TensorboardConfig, "logger.tensorboard").log_dir
        self.log_dir = str(given or log_dir or "tensorboard")
        self._run = f".{Path(log_dir).absolute().parent.name}" if given and log_dir else ""
        self._skipped: set[str] = set()
        self._open()

    def _open(self) -> None:
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob(f"{PATTERN}{self._run}"))
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{self._run}"
        self.path = files[-1] if files else folder / name
        if files:
            # readers stop at a partial record, which a killed process may leave, so remove it
            truncate_events(self.path, None)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self._descriptor).st_size == 0:
            self._append(file_version="brain.Event:2")

    def _append(self, **content: int | str | Summary) -> None:
        payload = Event(wall_time=time.time(), **content).SerializeToString()
        header = struct.pack("<Q", len(payload))
        os.write(self._descriptor, header + _masked_crc(header) + payload + _masked_crc(payload))

    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        """Append each number as a float32 scalar, clamped to the range of float32 if finite. Skip other values, and
        print one message per name of a skipped metric (none for strings)."""
        limit = float(np.finfo(np.float32).max)
        for name, value in flatten_dict(prefixed(metrics, prefix, None), sep="/", expand_lists=False).items():
            number = scalar_of(value)
            if number is not None and not isinstance(number, str):
                number = float(number) if not np.isfinite(number) else min(max(float(number), -limit), limit)
                scalar = Summary.Value(tag=writable(name), simple_value=number)
                self._append(step=step, summary=Summary(value=[scalar]))
            # strings, such as digests, are in metrics.jsonl only
            elif name not in self._skipped and not isinstance(value, str):
                self._skipped.add(name)
                print(f"TensorBoard: {name} is not logged, because it is a {type(value).__name__} and not a number")

    def log_hyperparams(self, params: Mapping[str, Plain]) -> None:
        """Append the settings as text, with one line `name: value` each."""
        lines = "\n".join(f"{name}: {value}" for name, value in flatten_dict(to_plain(params)).items())
        self._append(step=0, summary=text("hyperparams", f"```yaml\n{lines}\n```"))

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Append a histogram of the finite values, in 30 bins of equal width."""
        values = np.asarray(to_plain(histogram), dtype=np.float64).ravel()
        values = values[np.isfinite(values)]
        if values.size:
            bars = Summary.Value(tag=writable(name), histo=make_histogram(values, 30))
            self._append(step=step, summary=Summary(value=[bars]))

    def flush(self) -> None:
        os.fsync(self._descriptor)

    def finish(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def truncate_after(self, step: int) -> None:
        self.finish()
        for path in Path(self.log_dir).glob(f"{PATTERN}{self._run}"):
            truncate_events(path, step)
        self._open()


def truncate_events(path: Path, step: int | None) -> None:
    """Remove partial records, and records after `step` (if given), atomically. Other records keep their bytes."""
    content = path.read_bytes()
    kept = b"".join(record for record, event in records(content) if step is None or event.step <= step)
    if kept != content:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(kept)
        fsync_path(temporary)
        os.replace(temporary, path)


def records(content: bytes) -> Iterator[tuple[bytes, Event]]:
    """Yield (bytes, event) of each record in an event file's `content`, up to the first damaged or partial one."""
    position = 0
    while position + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        end = position + 12 + length + 4
        record = content[position:end]
        if end > len(content) or record[8:12] != _masked_crc(record[:8]):
            return
        yield record, Event.FromString(record[12:-4])
        position = end


def _masked_crc(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
