"""bitsandbytes' matrices as they lie in safetensors files, made and read one weight at a time in plain Python.

A matrix in nf4 is flattened into blocks of 64 weights, w = code[q] · absmax. Two q share a byte, the first in the high
half. With double quantisation absmax = nested_quant_map[byte] · nested_absmax + nested_offset, in blocks of 256. A matrix
in 8 bits has w = q · SCB / 127, with one SCB for each row."""

import json

import numpy as np

from .weight_blocks import NORMAL_FLOATS

BLOCK, NESTED_BLOCK = 64, 256
MAP = np.linspace(-1, 1, 256, dtype=np.float32) ** 3  # finer near 0
f = np.float32


def in_nf4(name: str, w: np.ndarray, nested: bool) -> dict[str, np.ndarray]:
    """Return the tensors of a float32 matrix in nf4."""
    flat = w.reshape(-1)
    absmax = np.array([np.abs(flat[k : k + BLOCK]).max() for k in range(0, len(flat), BLOCK)], f)
    codes = [
        min(range(16), key=lambda c: abs(float(x / absmax[i // BLOCK]) - NORMAL_FLOATS[c])) for i, x in enumerate(flat)
    ]
    packed = np.array([[a << 4 | b] for a, b in zip(codes[::2], codes[1::2], strict=True)], np.uint8)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(w.shape)}
    tensors = {name: packed, f"{name}.absmax": absmax, f"{name}.quant_map": np.array(NORMAL_FLOATS, f)}
    if nested:
        offset = absmax.mean()
        rest = absmax - offset
        outer = np.array([np.abs(rest[k : k + NESTED_BLOCK]).max() for k in range(0, len(rest), NESTED_BLOCK)], f)
        places = [int(np.abs(MAP - r / outer[i // NESTED_BLOCK]).argmin()) for i, r in enumerate(rest)]
        tensors |= {
            f"{name}.absmax": np.array(places, np.uint8), f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": MAP,
        }  # fmt: skip
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    return tensors | {f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8)}


def in_8_bits(name: str, w: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of a float32 matrix in 8 bits."""
    scales = np.abs(w).max(axis=1)
    q = np.round(w / scales[:, None] * 127).astype(np.int8)
    module = name.removesuffix(".weight")
    return {name: q, f"{module}.SCB": scales, f"{module}.weight_format": np.array(0, np.uint8)}


def decoded(name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return a matrix in float32."""
    scales = tensors.get(f"{name.removesuffix('.weight')}.SCB")
    if scales is not None:
        return np.array([[f(f(q) * scale) * f(1 / 127) for q in row] for row, scale in zip(tensors[name], scales)], f)
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"]))
    absmax = list(tensors[f"{name}.absmax"])
    if "nested_offset" in state:
        outer = tensors[f"{name}.nested_absmax"]
        absmax = [
            f(f(MAP[byte] * outer[i // NESTED_BLOCK]) + f(state["nested_offset"])) for i, byte in enumerate(absmax)
        ]
    codes = [code for (byte,) in tensors[name].tolist() for code in (byte >> 4, byte & 15)]
    weights = [f(NORMAL_FLOATS[code]) * absmax[i // BLOCK] for i, code in enumerate(codes)]
    return np.array(weights, f).reshape(state["shape"])
