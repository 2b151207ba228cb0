"""Rows of a batch into bins of a token budget: the algorithms of `sequence_packing.algorithm`, and dynamic batching."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.policy import PACKERS

Bins = list[list[int]]


def pack_shuffled(costs: Sequence[int], capacity: int) -> Bins:
    """First fit in an order that is the same for each number of costs."""
    order = list(range(len(costs)))
    random.Random(0).shuffle(order)  # of its own, so that a resumed run packs as the whole one did
    return C.pack_first_fit(costs, order, capacity)


class Prompts(NamedTuple):
    """Which samples of a batch may share a prompt."""

    ids: Sequence[Tensor]
    """[B] int64 token ids of each sample"""
    wanted: Sequence[Tensor]
    """[B] bool: which of its tokens are trained"""
    groups: list[int]
    """[B]: samples with one id >= 0 may share"""


def packed_bins(
    batch: C.RowBatch, prompts: Prompts, rows: list[int], max_tokens: int, share_prefix: bool, algorithm: str
) -> tuple[Bins, list[int]]:
    """Rows by bin, bins in the order of their first rows, and the tokens that each bin computes.

    Every one of `rows` (ascending) wants a token. Neighbouring rows with one prompt stay together, where the budget allows it,
    because the prompt is then computed once. A row that is longer than the budget stands alone.
    """
    units, costs = _units(prompts, rows, max_tokens, share_prefix)
    chosen = PACKERS[algorithm]([min(cost, max_tokens) for cost in costs], max_tokens) if units else []
    bins = sorted(sorted(row for unit in places for row in units[unit]) for places in chosen if places)
    return bins, [C.packed_tokens(batch, rows, share_prefix) for rows in bins]


def _units(prompts: Prompts, rows: list[int], max_tokens: int, share_prefix: bool) -> tuple[Bins, list[int]]:
    """Runs of rows that share a prompt, cut where the budget is reached, and the tokens that each computes."""
    ids, groups = prompts.ids, prompts.groups
    units: Bins = []
    costs: list[int] = []
    leader, leading = -1, 0  # the row with which the run of a prompt begins, and the length of its prompt
    for row in rows:
        wanted = prompts.wanted[row].nonzero().flatten()
        P, last = int(wanted[0]), int(wanted[-1])
        shares = (
            share_prefix and leader >= 0 and P > 0 and P == leading and groups[row] >= 0
            and groups[row] == groups[leader] and torch.equal(ids[row][:P], ids[leader][:P])
        )  # fmt: skip
        if shares and costs[-1] + last - P <= max_tokens:
            units[-1].append(row)
            costs[-1] += last - P
        else:
            units.append([row])
            costs.append(last)
        if not shares:
            leader, leading = row, P
    return units, costs


def dynamic_bins(lengths: list[int], width: int, rows: list[int], max_tokens: int, multiple: int) -> Bins:
    """Rows of similar lengths together: shortest first, a row joins while rows x longest length stays within `max_tokens`.

    A length counts rounded up to a multiple of `multiple`, at most `width`. A row that is longer than the budget stands alone.
    """
    if not rows:
        return []
    own = [min(lengths[row], max_tokens) for row in rows]
    plan = C.plan_dynamic_batching(own, len(rows), 1, max_tokens, multiple, min(width, max_tokens))
    spans = plan.micro_batch_indices[0]
    return [sorted(rows[place] for place in plan.order[begin:end]) for begin, end in spans if end > begin]
