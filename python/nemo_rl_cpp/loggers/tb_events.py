"""TensorBoard event files with tensorboardX's messages and checksums, cut back when a run resumes.

tensorboardX's `SummaryWriter` is not used: a queue stands between it and its file, which `flush` does not empty. A process
that was killed after `flush` had 94 of 100 events in its file. Here every event is one write to a file opened for appending, and a resumed run continues in
the same file. A record is: length u64, masked CRC-32C of it, `Event` message, masked CRC-32C of it.
"""

import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_rl_cpp.files.durable import fsync_path, own_copy

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

PATTERN = "events.out.tfevents.*"


class EventFile:
    """The event file of a folder: the newest one that is there (or that `own_files` names), else a new one."""

    def __init__(self, folder: Path, own_files: Collection[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(path for path in folder.glob(PATTERN) if own_files is None or path.name in own_files)
        self.path = files[-1] if files else _new_file(folder)
        own_copy(self.path)
        if files:
            # a record torn by a kill would hide everything written after it
            truncate_events(self.path, None)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self._descriptor).st_size == 0:
            self._append(file_version="brain.Event:2")

    def add(self, step: int, summary: "Summary") -> None:
        """Append one event of `step`."""
        self._append(step=step, summary=summary)

    def _append(self, **content: "int | str | Summary") -> None:
        from tensorboardX.proto.event_pb2 import Event

        os.write(self._descriptor, _record(Event(wall_time=time.time(), **content).SerializeToString()))

    def flush(self) -> None:
        """Syncs the file to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SummaryWriter(EventFile):
    """An event file under the names of TensorBoard's writer."""

    def __init__(self, log_dir: str | Path, own_files: Collection[str] | None = None) -> None:
        super().__init__(Path(log_dir), own_files)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Append a number, stored as float32."""
        from tensorboardX.proto.summary_pb2 import Summary

        limit = float(np.finfo(np.float32).max)
        value = float(scalar_value) if not np.isfinite(scalar_value) else min(max(float(scalar_value), -limit), limit)
        self.add(global_step, Summary(value=[Summary.Value(tag=_tag(tag), simple_value=value)]))

    def add_histogram(self, tag: str, values: Sequence[float], global_step: int) -> None:
        """Append a histogram of 30 equal bins over the values (finite, at least one)."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import make_histogram

        bars = make_histogram(np.asarray(values, dtype=np.float64), 30)
        self.add(global_step, Summary(value=[Summary.Value(tag=_tag(tag), histo=bars)]))

    def add_hparams(self, hparam_dict: Mapping[str, object], metric_dict: Mapping[str, object]) -> None:
        """Append the settings as a text, one `name: value` a line; `metric_dict` is ignored, since metrics are logged as such."""
        from tensorboardX.summary import text

        lines = "\n".join(f"{name}: {value}" for name, value in hparam_dict.items())
        self.add(0, text("hyperparams", f"```yaml\n{lines}\n```"))


def _new_file(folder: Path) -> Path:
    name, number = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}", 1
    path = folder / name
    while path.exists():  # another run's
        path, number = folder / f"{name}.{number}", number + 1
    return path


def _tag(name: str) -> str:
    """Return the name, which TensorBoard takes as it stands, with `_` for half of a surrogate pair."""
    return name.encode(errors="replace").decode()


def truncate_events(path: Path, step: int | None) -> None:
    """Keeps the whole records whose step is not later (None: of any step), unchanged byte for byte. Atomic."""
    content = path.read_bytes()
    kept = b"".join(record for record, event in records(content) if step is None or event.step <= step)
    if kept != content:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(kept)
        fsync_path(temporary)
        os.replace(temporary, path)


def records(content: bytes) -> Iterator[tuple[bytes, "Event"]]:
    """Yield (whole record, event) of an event file, up to the first record that is torn or damaged."""
    from tensorboardX.proto.event_pb2 import Event

    position = 0
    while position + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        end = position + 12 + length + 4
        record = content[position:end]
        if end > len(content) or record[8:12] != _masked_crc(record[:8]):
            return
        yield record, Event.FromString(record[12:-4])
        position = end


def _record(payload: bytes) -> bytes:
    header = struct.pack("<Q", len(payload))
    return header + _masked_crc(header) + payload + _masked_crc(payload)


def _masked_crc(data: bytes) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    return struct.pack("<I", masked_crc32c(data))
