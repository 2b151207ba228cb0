"""Blocks of 32 weights, one at a time in plain Python: ggml's q8_0 and q4_0 (ggml-quants.c), and nf4, normal floats of 4
bits (Dettmers et al. 2023, QLoRA, arXiv 2305.14314)."""

import struct
from statistics import NormalDist

import numpy as np

BYTES = {"q8_0": 34, "q4_0": 18, "nf4": 20}


def normal_floats() -> list[float]:
    """Return the codes of nf4: quantiles of the normal distribution at 8 probabilities from 0.9677083 down to 0.5, the
    negatives of those at 7, and 0, all divided by the largest."""
    largest, quantile = 0.9677083, NormalDist().inv_cdf
    above, below = ([quantile(largest + (0.5 - largest) * i / n) for i in range(n)] for n in (8, 7))
    return sorted(each / above[0] for each in (*above, 0.0, *(-each for each in below)))


def decoded(block: bytes, kind: str) -> list[float]:
    """Return the 32 weights of one block. Those of nf4 are products rounded to float32."""
    if kind == "nf4":
        (scale,) = struct.unpack("<f", block[:4])
        codes = [each & 15 for each in block[4:]] + [each >> 4 for each in block[4:]]
        return [float(np.float32(NORMAL_FLOATS[code]) * np.float32(scale)) for code in codes]
    (scale,) = struct.unpack("<e", block[:2])
    if kind == "q8_0":
        return [scale * q for q in struct.unpack("<32b", block[2:])]
    low, high = [each & 15 for each in block[2:]], [each >> 4 for each in block[2:]]
    return [scale * (q - 8) for q in low + high]


NORMAL_FLOATS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""`normal_floats` as they are written in files."""


def encoded_nf4(weights: list[float]) -> bytes:
    """Return the block of 32 float32 weights: of the codes nearest to weights whose farthest is at a place, and of the
    scale that fits these codes best, the ones with the least squared error. Every step is rounded to float32."""
    f = np.float32
    w = [f(each) for each in weights]
    farthest, scale, best = max(w, key=abs), f(0), f(-1)

    def code(x: np.float32) -> int:
        return min(range(16), key=lambda c: (abs(float(x) - NORMAL_FLOATS[c]), c))

    for place in (-1.18, -1.05, -0.95, 0.95, 1.05, 1.18) if abs(farthest) >= 2.0**-120 else ():
        x = [each * (f(1) / farthest) for each in w]
        values = [f(NORMAL_FLOATS[code(each * f(place))]) for each in x]
        products = squares = f(0)
        for each, value in zip(x, values, strict=True):
            products, squares = products + each * value, squares + value * value
        if (score := products * products / squares) > best:
            best, scale = score, farthest * (products / squares)
    inverse = f(0) if scale == 0 else f(1) / scale
    q = [code(each * inverse) for each in w]
    return struct.pack("<f", float(scale)) + bytes(a | b << 4 for a, b in zip(q[:16], q[16:], strict=True))


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
