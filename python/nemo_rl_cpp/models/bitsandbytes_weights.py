"""The tensors of a safetensors file that bitsandbytes quantised: nf4, or 8 bits with a scale for each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from nemo_rl_cpp.hub.sources import ModelFolderError

STATE, ROW_SCALES = ".quant_state.bitsandbytes__", ".SCB"
CODES = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
     0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
"""The codes of nf4 (csrc/kernels/weight_blocks.h)."""
Place = tuple[str, list[int], int, int]
"""The place of a tensor in a file: (dtype, shape, first byte, byte after the last one)."""
_BLOCK = 32  # weights of a block of the native core
_LEAST_SCALE = 2.0**-120  # kNormalFloatLeast of csrc/kernels/weight_blocks.h
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = {"F32": np.float32, "U8": np.uint8, "I8": np.int8}


class QuantisedTensors:
    """The tensors of a safetensors file that bitsandbytes wrote, with each quantised matrix, which the file stores as
    several tensors (codes and scales), as one. `places` maps a name to its `Place`. `restored` returns a matrix in nf4
    in the native core's block format NF4, and a matrix in 8 bits as float32."""

    def __init__(self, file: Path, entries: Mapping[str, Place]) -> None:
        self._file, self._entries = file, entries
        self._states: dict[str, dict[str, object]] = {}
        self.places: dict[str, Place] = {}
        hidden = set()
        for name in entries:
            weight, state, kind = name.partition(STATE)
            if state:
                self._states[weight] = self._state(weight, kind, name)
                hidden |= {name, *(f"{weight}.{part}" for part in _PARTS)}
            elif name.endswith(ROW_SCALES):
                order = f"{name.removesuffix(ROW_SCALES)}.weight_format"
                if order in entries and self._read(order).any():
                    raise ModelFolderError(f"{file}: {order} is not 0: only 8-bit matrices in rows are read")
                hidden |= {name, order}
        for name, (dtype, shape, begin, end) in entries.items():
            if name in self._states:
                dtype, shape = "NF4", list(self._states[name]["shape"])
            elif name.removesuffix(".weight") + ROW_SCALES in entries:
                dtype = "F32"
            if name not in hidden:
                self.places[name] = (dtype, shape, begin, end)

    def _state(self, weight: str, kind: str, name: str) -> dict[str, object]:
        """Return bitsandbytes' description of the 4-bit matrix `weight`, read from the tensor `name` of the file."""
        if kind != "nf4":
            raise ModelFolderError(f"{self._file}: {weight} is in bitsandbytes' {kind}, but only nf4 is read in 4 bits")
        try:
            state = json.loads(bytes(self._read(name)))
            rows, columns = state["shape"]
            packed = prod(self._entries[weight][1])
            if packed * 2 != rows * columns or columns % _BLOCK or state["blocksize"] % _BLOCK:
                raise ValueError(f"{packed} bytes in blocks of {state['blocksize']} for a matrix of {rows} x {columns}")
            if not np.array_equal(self._read(f"{weight}.quant_map"), CODES):
                raise ValueError("its quant_map differs from the codes of nf4")
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"{self._file}: {weight} is not a matrix in nf4 that can be read ({error})"
            ) from None
        return state

    def _read(self, name: str) -> np.ndarray:
        dtype, shape, begin, end = self._entries[name]
        with self._file.open("rb") as handle:
            handle.seek(begin)
            return np.frombuffer(handle.read(end - begin), _DTYPES[dtype]).reshape(shape)

    def restored(self, name: str, data: memoryview) -> memoryview:
        """Return the bytes of the tensor `name`, given its bytes `data` in the file: nf4 becomes the native core's
        blocks, 8 bits become float32, and all others are `data` itself."""
        if name in self._states:
            made = self._blocks(name, data)
        elif (scales := name.removesuffix(".weight") + ROW_SCALES) in self._entries:
            rows = np.frombuffer(data, np.int8).reshape(self.places[name][1]).astype(np.float32)
            made = rows * self._read(scales).reshape(-1, 1) * np.float32(1 / 127)
        else:
            return data
        return memoryview(np.ascontiguousarray(made)).cast("B")

    def _blocks(self, name: str, data: memoryview) -> np.ndarray:
        """Return the 4-bit matrix `name`, whose bytes in the file are `data`, in the native core's blocks of 32
        weights: a float32 scale and 16 bytes, of which byte i holds weight i in its low half and weight i + 16 in its
        high half. A byte of bitsandbytes holds two adjacent weights, the first in the high half."""
        packed = np.frombuffer(data, np.uint8)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1, _BLOCK)
        scales = np.repeat(self._scales(name), self._states[name]["blocksize"] // _BLOCK)[: len(codes)]
        blocks = np.empty((len(codes), 4 + _BLOCK // 2), np.uint8)
        scales = np.where(scales < _LEAST_SCALE, 0, scales)
        blocks[:, :4] = scales.astype(np.float32).view(np.uint8).reshape(-1, 4)
        blocks[:, 4:] = codes[:, : _BLOCK // 2] | codes[:, _BLOCK // 2 :] << 4
        return blocks

    def _scales(self, name: str) -> np.ndarray:
        """Return the float32 scale of each block of the matrix `name` in nf4. With double quantisation the file stores
        them in 8 bits."""
        state, absmax = self._states[name], self._read(f"{name}.absmax").reshape(-1)
        if f"{name}.nested_absmax" not in self._entries:
            return absmax
        outer = np.repeat(self._read(f"{name}.nested_absmax").reshape(-1), state["nested_blocksize"])[: len(absmax)]
        return self._read(f"{name}.nested_quant_map")[absmax] * outer + np.float32(state["nested_offset"])


def decoded_blocks(data: bytes | memoryview) -> np.ndarray:
    """Return the weights in `data`, blocks of nf4 in the native core's format, as a flat float32 array."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 4 + _BLOCK // 2)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (CODES[codes] * np.ascontiguousarray(blocks[:, :4]).view(np.float32)).reshape(-1)
