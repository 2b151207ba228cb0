"""Splits the expert tensors of gpt-oss's checkpoints into one tensor per matrix, which the native core reads. Needs no
torch.

A checkpoint holds for all E experts of a layer, with D hidden and I expert columns:

    mlp.experts.gate_up_proj [E, D, 2I]     columns gate, up, gate, up, ...     gate_up_proj_bias [E, 2I]
    mlp.experts.down_proj    [E, I, D]                                          down_proj_bias    [E, D]

or in MXFP4 (Open Compute Project, Microscaling Formats 1.0) gate_up_proj_blocks [E, 2I, D/32, 16] with
gate_up_proj_scales [E, 2I, D/32], and down_proj_blocks [E, D, I/32, 16] with down_proj_scales [E, D, I/32]: a byte of a
block holds two values of 4 bits, the lower bits first, and a scale s multiplies 32 values by 2^(s - 127).

The native core reads mlp.experts.E.{gate_proj,up_proj,down_proj}.{weight,bias}, matrices as [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from nemo_rl_cpp.models.weight_files import RawTensor, TensorEntry

_NAME = re.compile(r"(.*mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_WORDS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}  # integers, because numbers are only moved
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def is_fused(shapes: Container[str]) -> bool:
    """Return whether a model with these parameters has checkpoints with fused experts."""
    return "model.layers.0.mlp.experts.0.gate_proj.bias" in shapes


def split_experts(
    tensors: Iterable[tuple[str, RawTensor | TensorEntry]],
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the tensors of a checkpoint, with fused experts split into the matrices and biases of single experts, which
    get the native core's names.

    A tensor of fused experts with an unexpected number of dimensions is yielded unchanged. Entries of a file's header
    (`TensorEntry`) are split in the same way, without data.
    """
    halves: dict[str, RawTensor | TensorEntry] = {}
    for name, tensor in tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        prefix, matrix, kind = found.groups()
        if kind in ("_blocks", "_scales"):
            other = halves.pop(prefix + matrix, None)
            if other is None:
                halves[prefix + matrix] = _kept(tensor)
                continue
            blocks, scales = (tensor, other) if kind == "_blocks" else (other, tensor)
            if len(blocks.shape) != 4 or list(blocks.shape[:3]) != list(scales.shape) or blocks.shape[3] != 16:
                yield name, tensor
                continue
            yield from _split_blocks(prefix, matrix, blocks, scales)
        elif tensor.dtype not in _WORDS or len(tensor.shape) != (2 if kind else 3):
            yield name, tensor
        else:
            yield from _split_numbers(prefix, matrix, tensor)
    for name, tensor in halves.items():
        yield f"{name}_blocks without {name}_scales, or the reverse", tensor


def _kept(tensor: RawTensor | TensorEntry) -> RawTensor | TensorEntry:
    """Return the tensor with a copy of its data, because the original is only valid until the next tensor is read."""
    return tensor._replace(data=memoryview(bytes(tensor.data))) if hasattr(tensor, "data") else tensor


def _split_numbers(
    prefix: str, matrix: str, tensor: RawTensor | TensorEntry
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the experts of a tensor of floats: [E, in, out], or biases [E, out]."""
    import numpy as np

    kind = "bias" if len(tensor.shape) == 2 else "weight"
    values = None
    if hasattr(tensor, "data"):
        values = np.frombuffer(tensor.data, _WORDS[tensor.dtype]).reshape(tensor.shape)
    for expert in range(tensor.shape[0]):
        rows = None if values is None else values[expert].T
        yield from _parts(f"{prefix}{expert}.", matrix, kind, tensor, list(reversed(tensor.shape[1:])), rows)


def _split_blocks(
    prefix: str, matrix: str, blocks: RawTensor | TensorEntry, scales: RawTensor | TensorEntry
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the experts of MXFP4 blocks in bfloat16, which holds every value exactly."""
    import numpy as np

    experts, rows, groups, _ = blocks.shape
    shape = [rows, groups * 32]
    known = blocks._replace(dtype="BF16")
    for expert in range(experts):
        values = None
        if hasattr(blocks, "data"):
            of_blocks = np.frombuffer(blocks.data, np.uint8).reshape(blocks.shape)[expert]
            of_scales = np.frombuffer(scales.data, np.uint8).reshape(scales.shape)[expert].astype(np.uint16)
            values = _pairs()[(of_scales[..., None] << 8) | of_blocks].view("<u2").reshape(shape)
        yield from _parts(f"{prefix}{expert}.", matrix, "weight", known, shape, values)


@cache
def _pairs() -> np.ndarray:
    """Return a table for decoding MXFP4: entry scale * 256 + byte holds the byte's two bfloat16 values in 32 bits."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float32) - 127)
        values = powers[:, None] * np.array(_FP4, np.float32)
    words = values.view(np.uint32) >> 16
    byte = np.arange(256)
    return np.ascontiguousarray(words[:, byte & 15] | (words[:, byte >> 4] << 16)).reshape(-1)


def _parts(
    expert: str, matrix: str, kind: str, tensor: RawTensor | TensorEntry, shape: list[int], rows: np.ndarray | None
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield (name, tensor) of an expert's down_proj, or of its gate_proj (the even rows) and up_proj (the odd rows).
    `rows` holds the values, a matrix [out, in] or a bias [out]; if None, the tensors have no data."""
    import numpy as np

    if matrix == "down_proj":
        parts = [("down_proj", shape, slice(None))]
    else:
        half = [shape[0] // 2, *shape[1:]]
        parts = [("gate_proj", half, slice(0, None, 2)), ("up_proj", half, slice(1, None, 2))]
    for name, size, every in parts:
        part = tensor._replace(shape=size)
        if rows is not None:
            copied = np.array(rows[every], order="C")  # a copy: the file is closed before the next one opens
            part = part._replace(data=memoryview(copied.view(np.uint8).reshape(-1)))
        yield f"{expert}{name}.{kind}", part
