"""Samples that change their rank before training, since some have a backward pass and others have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A move is worth its message where it takes so much from what the busiest rank has to do.
LEAST_GAIN = 0.05


class Move(NamedTuple):
    """Samples `rows` that rank `source` has generated and rank `target` trains."""

    rows: list[int]
    source: int
    target: int


def even_moves(units: Sequence[Sequence[tuple[list[int], int]]]) -> list[Move]:
    """Moves after which the busiest rank has less to do.

    Args:
        units: for each rank the samples that stay together, and what they cost.

    From the busiest rank to the idlest one goes the unit that leaves the smaller maximum of both, the first of equal ones, as long as that
    gains something. The result depends on the arguments alone, so every rank finds the same one.
    """
    left = [list(own) for own in units]
    load = [sum(cost for _, cost in own) for own in left]
    found: list[Move] = []
    while True:
        source, target = load.index(max(load)), load.index(min(load))
        after = [max(load[source] - cost, load[target] + cost) for _, cost in left[source]]
        if not after or min(after) > (1 - LEAST_GAIN) * load[source]:
            return found
        rows, cost = left[source].pop(after.index(min(after)))
        load[source] -= cost
        load[target] += cost
        found.append(Move(rows, source, target))
