"""Numbers as a page shows them: short, and few enough to be drawn."""

import math
from collections.abc import Sequence

MAX_POINTS = 400


def format_number(value: float) -> str:
    """A short text for an axis or a tile: 4 significant digits, k/M/G for large numbers."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if value != 0 and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def downsample(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most about `limit` points that still show every spike: the lowest and the highest of each stretch."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    keep: set[int] = {0, len(xs) - 1}
    size = len(xs) / (limit / 2)
    for bucket in range(limit // 2):
        members = [i for i in range(int(bucket * size), min(int((bucket + 1) * size), len(xs))) if math.isfinite(ys[i])]
        if members:
            keep |= {min(members, key=ys.__getitem__), max(members, key=ys.__getitem__)}
    order = sorted(keep)
    return [xs[i] for i in order], [ys[i] for i in order]
