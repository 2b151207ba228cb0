"""AdamW's moments in eight bits, as tables of the numbers that can be stored, and master weights in two halves."""

import numpy as np
import torch


def squares() -> np.ndarray:
    """Return the second moments by code: floats with two bits of mantissa from 2^-58 on, less 2^-58."""
    return np.array([(1 + code % 4 / 4) * 2.0 ** (code // 4 - 58) - 2.0**-58 for code in range(256)])


def ratios() -> np.ndarray:
    """Return the first moments over the roots of the second ones, by code without its sign: floats with four bits of
    mantissa from 2^-5 on, less 2^-5."""
    return np.array([(1 + code % 16 / 16) * 2.0 ** (code // 16 - 5) - 2.0**-5 for code in range(128)])


def moments(exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both moments in float64 from their codes."""
    v = squares()[exp_avg_sq]
    return np.where(exp_avg < 128, 1, -1) * ratios()[exp_avg % 128] * np.sqrt(v), v


def neighbours(table: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the table next to x: the largest that is not above it, and the one after."""
    place = np.searchsorted(table, x, side="right") - 1
    return table[place], table[np.minimum(place + 1, len(table) - 1)]


def joined(compute: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights: the bits of the bfloat16 weights, shifted, plus the remainders."""
    return ((compute.view(torch.int16).int() << 16) + remainders.int()).view(torch.float32)
