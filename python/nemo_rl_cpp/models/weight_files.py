"""What a Hugging Face folder's safetensors files hold, and whether that is what a model needs. Works without torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class RawTensor(NamedTuple):
    """A tensor as it lies in its file: `dtype` as safetensors writes it ("F32", "BF16"), `data` mapped, not read, and there
    until the next tensor is asked for."""

    dtype: str
    shape: list[int]
    data: memoryview


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises ValueError if there are none, or if the index names one that is not there."""
    index = folder / INDEX_FILE
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [n for n in names if not (folder / n).exists()]
        if absent:
            raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
        return [folder / n for n in names]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise ValueError(f"{folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE} (other formats are not read)")


def raw_tensors(files: Iterable[Path]) -> Iterator[tuple[str, RawTensor]]:
    """Every tensor of the files under its name, without a copy. (The safetensors library reads bfloat16 into torch only.)

    A file is eight bytes that give the length of a header, the header in JSON, and the tensors' bytes.
    """
    for file in files:
        with file.open("rb") as handle, _mapped(handle, file) as content, memoryview(content) as data:
            begins, entries = _header(data, file)
            for name, (dtype, shape, begin, end) in entries.items():
                with data[begins + begin : begins + end] as tensor:
                    yield name, RawTensor(dtype, shape, tensor)


def _mapped(handle: BinaryIO, file: Path) -> mmap.mmap:
    try:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file
        raise _damaged(file, error) from None


def _header(data: memoryview, file: Path) -> tuple[int, dict[str, tuple[str, list[int], int, int]]]:
    """Where the tensors' bytes begin, and of every tensor its dtype, shape, and begin and end from there."""
    try:
        begins = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:begins]))
        entries = {n: (e["dtype"], e["shape"], *e["data_offsets"]) for n, e in header.items() if n != "__metadata__"}
        if any(begins + end > len(data) for *_, end in entries.values()):
            raise ValueError("a tensor ends behind the end of the file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, error) from None
    return begins, entries


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is not a whole safetensors file ({error}): copy or download it again")


def fill_parameters(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Any]],
    put: Callable[[str, Any], None],
) -> None:
    """Calls put(name, tensor) for every parameter of `shapes` that `tensors` (of `folder`) hold.

    A causal checkpoint may be read into a value model: its head is left out, and score.weight need not be there.

    Raises:
        ValueError: a tensor is missing, unexpected or of the wrong shape; all are named.
    """
    missing, wrong, extra = set(shapes), [], []
    for given, tensor in tensors:
        name = _known_name(given, shapes)
        if name in shapes:
            if list(tensor.shape) != list(shapes[name]):
                wrong.append(f"{name} is {list(tensor.shape)}, expected {list(shapes[name])}")
            else:
                put(name, tensor)
            missing.discard(name)
        elif not _is_harmless(name, shapes):
            extra.append(name)
    missing.discard("score.weight")
    if missing or wrong or extra:
        parts = [("missing", sorted(missing)), ("of the wrong shape", wrong), ("unexpected", sorted(extra))]
        listed = "; ".join(f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" for what, names in parts if names)
        raise ValueError(f"the weights in {folder} do not fit its config.json: {listed}")


def _known_name(name: str, shapes: Mapping[str, Any]) -> str:
    """Base-model checkpoints lack the `model.` prefix."""
    return f"model.{name}" if name not in shapes and f"model.{name}" in shapes else name


def _is_harmless(name: str, shapes: Mapping[str, Any]) -> bool:
    tied_or_value_head = name == "lm_head.weight" and "lm_head.weight" not in shapes
    return tied_or_value_head or name.endswith("rotary_emb.inv_freq")
