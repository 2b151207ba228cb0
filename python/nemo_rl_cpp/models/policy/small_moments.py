"""AdamW's moments in eight bits, converted to and from numbers as in csrc/kernels/adamw.h.

The second moment v is a float of few bits. The first moment is stored as its ratio to the root of v, with a sign bit."""

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_RATIO, _SQUARE = (4, -5, 127), (2, -58, 255)
"""Of a stored number: bits of its mantissa, power of two of the lowest exponent, largest code."""


def converted(moments: list[Tensor], to_codes: bool) -> tuple[Tensor, Tensor]:
    """Return AdamW's `moments` (first, second) as codes of eight bits, each rounded to the nearest, or if not
    `to_codes`, the float32 numbers that such codes stand for."""
    if not to_codes:
        codes, squares = moments
        ratios, squares = _value(codes & 127, *_RATIO), _value(squares, *_SQUARE)
        return torch.where(codes < 128, ratios, -ratios) * squares.sqrt(), squares
    first, second = (moment.float() for moment in moments)
    squares = _code(second, *_SQUARE)
    roots = _value(squares, *_SQUARE).sqrt()
    ratios = _code(torch.where(squares > 0, (first.abs() / roots).clamp(max=8.0), 0.0), *_RATIO)
    return ratios | ((first < 0).to(torch.uint8) << 7), squares


def _value(codes: Tensor, mantissa: int, lowest: int, most: int) -> Tensor:
    bits = (codes.int() + ((127 + lowest) << mantissa)) << (23 - mantissa)
    return bits.view(torch.float32) - 2.0**lowest


def _code(numbers: Tensor, mantissa: int, lowest: int, most: int) -> Tensor:
    cut = 23 - mantissa
    bits = (numbers + 2.0**lowest).view(torch.int32) + (1 << (cut - 1))
    return ((bits >> cut) - ((127 + lowest) << mantissa)).clamp(0, most).to(torch.uint8)
