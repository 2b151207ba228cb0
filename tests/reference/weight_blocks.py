"""ggml's blocks of 32 weights (ggml-quants.c), one block at a time in plain Python."""

import struct

import numpy as np

BYTES = {"q8_0": 34, "q4_0": 18}


def decoded(block: bytes, kind: str) -> list[float]:
    """Return the 32 weights of one block."""
    (scale,) = struct.unpack("<e", block[:2])
    if kind == "q8_0":
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    low, high = [each & 15 for each in block[2:]], [each >> 4 for each in block[2:]]
    return [scale * (q - 8) for q in low + high]


def encoded(weights: list[float], kind: str) -> bytes:
    """Return the block of 32 float32 weights; every step is rounded to float32."""
    f = np.float32
    weights = [f(w) for w in weights]
    farthest = max(weights, key=abs)  # the first, if several are equal
    scale = abs(farthest) / f(127) if kind == "q8_0" else farthest / f(-8)
    inverse = f(0) if scale == 0 else f(1) / scale
    head = struct.pack("<e", float(scale))
    if kind == "q8_0":
        return head + struct.pack("<32b", *(int(np.sign(w) * np.floor(float(abs(w * inverse)) + 0.5)) for w in weights))
    q = [min(15, int(w * inverse + f(8.5))) for w in weights]
    return head + bytes(low | high << 4 for low, high in zip(q[:16], q[16:], strict=True))
