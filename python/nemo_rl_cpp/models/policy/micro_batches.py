"""Splits the rows of a global batch into micro-batches: packed within a token budget by `sequence_packing.algorithm`,
or by dynamic batching."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.policy import PACKERS
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch

Bins = list[list[int]]


def pack_shuffled(costs: Sequence[int], capacity: int) -> Bins:
    """Pack by first fit, in a shuffled order that depends only on the number of costs."""
    order = list(range(len(costs)))
    random.Random(0).shuffle(order)  # a separate generator, so that a resumed run packs identically
    return C.pack_first_fit(costs, order, capacity)


def packed_bins(batch: C.RowBatch, rows: list[int], max_tokens: int, share_prefix: bool, algorithm: str) -> Bins:
    """Pack rows into bins, ordered by their first rows.

    Each of `rows` (ascending) has a wanted token (see `wanted_tokens`). Neighbouring rows with the same prompt stay
    together if the budget allows, because the prompt is then computed once. A row longer than the budget gets its own
    bin.
    """
    units, costs = C.prompt_units(batch, rows, max_tokens, share_prefix)
    chosen = PACKERS[algorithm]([min(cost, max_tokens) for cost in costs], max_tokens) if units else []
    return sorted(sorted(row for unit in places for row in units[unit]) for places in chosen if places)


def dynamic_bins(lengths: list[int], width: int, rows: list[int], max_tokens: int, multiple: int) -> Bins:
    """Group rows of similar lengths, shortest first, while rows x longest length stays within `max_tokens`.

    Lengths are rounded up to a multiple of `multiple`, at most `width`. A row longer than the budget gets its own bin.
    """
    if not rows:
        return []
    own = [min(lengths[row], max_tokens) for row in rows]
    plan = C.plan_dynamic_batching(own, len(rows), 1, max_tokens, multiple, min(width, max_tokens))
    spans = plan.micro_batch_indices[0]
    return [sorted(rows[place] for place in plan.order[begin:end]) for begin, end in spans if end > begin]


@dataclass(frozen=True)
class MicroBatching:
    """How rows are split into micro-batches: by number of samples, or by a token budget.

    With a budget, rows are packed by `algorithm` (`sequence_packing`), or, with `length_round` > 0, grouped by their
    lengths, rounded up to a multiple of it (`dynamic_batching`).
    """

    max_samples: int = 0
    max_tokens: int = 0
    algorithm: str = "modified_first_fit_decreasing"
    largest_first: bool = False
    length_round: int = 0
    share_prefix: bool = True
    checkpoint: bool = False


class RowBatch(C.RowBatch):
    """A batch with its native view; samples share prompts by `group_id` (no sharing without that name).

    Attributes:
        data: the batch.
        wanted: bool [T], see `wanted_tokens`.
        targets: int64 [T, K]: the tokens that are scored at the place of a wanted one, with results [T, K]; None for
            the wanted tokens themselves, with results [T].
    """

    def __init__(self, data: RaggedBatch, wanted: Tensor, targets: Tensor | None = None) -> None:
        ids = data.tokens["input_ids"].to(torch.int64).contiguous()
        super().__init__(ids, data.starts, data.lengths, wanted.contiguous(), group_ids(data), targets)
        self.data, self.wanted = data, wanted

    def wanted_of(self, row: int) -> Tensor:
        """Return bool [length of the sample]: its wanted tokens."""
        start = int(self.data.starts[row])
        return self.wanted[start : start + int(self.data.lengths[row])]


def group_ids(data: RaggedBatch) -> Tensor:
    """Return int64 [B]; -1 (no sharing) without `group_id`."""
    groups = data.samples.get("group_id")
    groups = torch.full((data.size,), -1) if groups is None else torch.as_tensor(groups)
    return groups.to(torch.int64).contiguous()


def wanted_tokens(data: RaggedBatch) -> Tensor:
    """Return bool [T]: trained tokens of valid samples; without masks all tokens except each sample's first."""
    wanted = torch.ones(data.num_tokens, dtype=torch.bool)
    if "token_mask" in data.tokens:
        wanted &= data.tokens["token_mask"] != 0
    if "sample_mask" in data.samples:
        wanted &= data.by_token(data.samples["sample_mask"] != 0)
    wanted[data.starts] = False
    return wanted


def plan(
    data: RaggedBatch, wanted: Tensor, rows: Iterable[int], batching: MicroBatching, apart: Tensor | None = None
) -> tuple[RowBatch, list[list[int]]]:
    """Return the native batch and the micro-batches of `rows`, ascending samples. Samples without a wanted token are
    omitted; samples in `apart` (bool [B]) come last, in separate micro-batches."""
    batch = RowBatch(data, wanted)
    used = (data.by_sample(wanted.int()) > 0).tolist()
    last = [False] * data.size if apart is None else apart.tolist()
    rows = [b for b in rows if used[b]]
    parts = [b for b in rows if not last[b]], [b for b in rows if last[b]]
    return batch, [micro for part in parts for micro in cut_rows(batch, part, batching)]


def cut_rows(batch: C.RowBatch, rows: list[int], batching: MicroBatching) -> Bins:
    """Split `rows`, ascending rows with a wanted token each, into micro-batches."""
    if not batching.max_tokens:
        count = batching.max_samples or max(len(rows), 1)
        return [rows[begin : begin + count] for begin in range(0, len(rows), count)]
    budget = batching.max_tokens
    if batching.length_round:
        return dynamic_bins(batch.data.lengths.tolist(), batch.data.width, rows, budget, batching.length_round)
    bins = packed_bins(batch, rows, budget, batching.share_prefix, batching.algorithm)
    if batching.largest_first:
        bins.sort(key=lambda rows: -C.packed_tokens(batch, rows, batching.share_prefix))  # stable
    return bins


@dataclass
class MicroBatch:
    """Some samples of a batch in the layout for a loss: padded to the longest of them.

    Attributes:
        rows: indices of the samples.
        width: tokens of the longest sample, at least 2.
        places: int64 [b, width] index of each position's token in the batch.
        inside: bool [b, width] whether the position holds a token.
    """

    rows: list[int]
    width: int
    places: Tensor
    inside: Tensor

    @staticmethod
    def of(data: RaggedBatch, rows: list[int]) -> MicroBatch:
        index = torch.tensor(rows)
        width = max(2, int(data.lengths[index].max()))
        return MicroBatch(rows, width, *data.places(index, width))

    def padded(self, of_tokens: Tensor) -> Tensor:
        """Pad [T, ...] of the batch to [b, width, ...], with 0 after the end of a sample."""
        picked = of_tokens[self.places]
        picked[~self.inside] = 0
        return picked

    def write(self, padded: Tensor, into: Tensor, first_column: int = 0) -> None:
        """Write [b, width - first_column] to its places in [T]."""
        inside = self.inside[:, first_column:]
        into[self.places[:, first_column:][inside]] = padded[inside].to(into.dtype)

    def data(self, batch: RaggedBatch) -> dict[str, object]:
        """Return all data of these samples, by NeMo RL's names; masks are float."""
        index = torch.tensor(self.rows)
        data: dict[str, object] = {name: self.padded(value) for name, value in batch.tokens.items()}
        data["input_lengths"] = batch.lengths[index].int()
        data |= {name: batch.of_samples(value, self.rows) for name, value in batch.samples.items()}
        for name in ("token_mask", "sample_mask"):
            data[name] = data[name].float()
        return data
