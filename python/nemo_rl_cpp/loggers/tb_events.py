"""TensorBoard event files, written and cut back without TensorBoard: records of small protobuf messages.

A record is: length u64, masked CRC-32C of it, payload, masked CRC-32C of it. The payload is an `Event` message
(tensorflow/core/util/event.proto): wall_time = 1 (double), step = 2 (varint), file_version = 3, summary = 5.
Every event is one write to a file opened for appending, so a killed process loses nothing that was logged before, and a
resumed run goes on in the same file.
"""

import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from nemo_rl_cpp.files.durable import fsync_path, own_copy

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
            self._append(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def add(self, step: int, values: Sequence[bytes]) -> None:
        """One event of `step` with these values (`scalar`, `histogram`, `text`, `image`)."""
        if values:
            summary = b"".join(_bytes(1, value) for value in values)
            self._append(_double(1, time.time()) + _varint_field(2, step) + _bytes(5, summary))

    def _append(self, payload: bytes) -> None:
        header = struct.pack("<Q", len(payload))
        os.write(self._descriptor, header + _masked_crc(header) + payload + _masked_crc(payload))

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
        """A number (stored as float32)."""
        self.add(global_step, [scalar(tag, float(scalar_value))])

    def add_histogram(self, tag: str, values: Sequence[float], global_step: int) -> None:
        """30 equal bins over the values (finite, at least one)."""
        self.add(global_step, [histogram(tag, values)])

    def add_hparams(self, hparam_dict: Mapping[str, object], metric_dict: Mapping[str, object]) -> None:
        """The settings as a text, one `name: value` a line; `metric_dict` is ignored, since metrics are logged as such."""
        lines = "\n".join(f"{name}: {value}" for name, value in hparam_dict.items())
        self.add(0, [text("hyperparams", f"```yaml\n{lines}\n```")])


def _new_file(folder: Path) -> Path:
    name, number = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}", 1
    path = folder / name
    while path.exists():  # another run's
        path, number = folder / f"{name}.{number}", number + 1
    return path


def scalar(tag: str, value: float) -> bytes:
    """A `Summary.Value` with a number (stored as float32)."""
    return _tag(tag) + _key(2, 5) + struct.pack("<f", _clamp_float32(value))


def histogram(tag: str, values: Sequence[float]) -> bytes:
    """A `Summary.Value` with 30 equal bins over the values (finite, at least one)."""
    low, high = min(values), max(values)
    width = (high - low) / 30 or 1.0
    counts = [0.0] * 30
    for value in values:
        counts[min(int((value - low) / width), 29)] += 1.0
    limits = [low + width * (index + 1) for index in range(30)]
    facts = (low, high, float(len(values)), sum(values), sum(value * value for value in values))
    message = b"".join(_double(field, value) for field, value in enumerate(facts, start=1))
    for field, numbers in ((6, limits), (7, counts)):
        message += _bytes(field, struct.pack(f"<{len(numbers)}d", *numbers))
    return _tag(tag) + _bytes(5, message)


def text(tag: str, content: str) -> bytes:
    """A `Summary.Value` of the text plugin (Markdown)."""
    metadata = _bytes(1, _bytes(1, b"text"))
    tensor = _varint_field(1, 7) + _bytes(2, _bytes(2, _varint_field(1, 1))) + _bytes(8, content.encode())
    return _tag(f"{tag}/text_summary") + _bytes(8, tensor) + _bytes(9, metadata)


def image(tag: str, png: bytes, width: int, height: int) -> bytes:
    """A `Summary.Value` with a PNG image."""
    message = _varint_field(1, height) + _varint_field(2, width) + _varint_field(3, 4) + _bytes(4, png)
    return _tag(tag) + _bytes(4, message)


def truncate_events(path: Path, step: int | None) -> None:
    """Keeps the whole records whose step is not later (None: of any step), unchanged byte for byte. Atomic."""
    content = path.read_bytes()
    kept = b"".join(record for record, payload in records(content) if step is None or step_of_event(payload) <= step)
    if kept != content:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(kept)
        fsync_path(temporary)
        os.replace(temporary, path)


def records(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(whole record, payload) of an event file, up to the first record that is torn or damaged."""
    position = 0
    while position + 12 <= len(content):
        header = content[position : position + 8]
        (length,) = struct.unpack("<Q", header)
        end = position + 12 + length + 4
        if end > len(content) or content[position + 8 : position + 12] != _masked_crc(header):
            return
        yield content[position:end], content[position + 12 : end - 4]
        position = end


def step_of_event(payload: bytes) -> int:
    """The step of an `Event`; 0 when it has none."""
    position = 0
    while position < len(payload):
        key, position = _read_varint(payload, position)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _read_varint(payload, position)
            if field == 2:
                return value
        elif kind == 2:
            length, position = _read_varint(payload, position)
            position += length
        else:
            position += 8 if kind == 1 else 4
    return 0


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _tag(tag: str) -> bytes:
    return _bytes(1, tag.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _varint_field(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _clamp_float32(value: float) -> float:
    limit = 3.4028234e38
    return value if value != value or abs(value) == float("inf") else max(-limit, min(limit, value))


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
