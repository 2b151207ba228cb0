"""Split the rows of a global batch into micro-batches: by number of rows, by packing within a token budget
(`sequence_packing.algorithm`), or by dynamic batching."""

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
    """Return bins of indices of `costs` whose costs add up to at most `capacity`, packed by first fit in a shuffled
    order that depends only on the number of costs."""
    order = list(range(len(costs)))
    random.Random(0).shuffle(order)  # a separate generator, so that a resumed run packs identically
    return C.pack_first_fit(costs, order, capacity)


@dataclass(frozen=True)
class MicroBatching:
    """The settings by which rows are split into micro-batches: at most `max_samples` rows, or if `max_tokens` > 0 at
    most that many tokens.

    With a token budget, rows are packed by `algorithm` (`sequence_packing`), and `largest_first` sorts the
    micro-batches by their number of tokens, descending. If `length_round` > 0, rows of similar length are grouped
    instead (`dynamic_batching`), and their lengths are rounded up to a multiple of `length_round`. With `share_prefix`,
    adjacent rows of one prompt compute it once. `checkpoint` switches activation checkpointing on."""

    max_samples: int = 0
    max_tokens: int = 0
    algorithm: str = "modified_first_fit_decreasing"
    largest_first: bool = False
    length_round: int = 0
    share_prefix: bool = True
    checkpoint: bool = False


class RowBatch(C.RowBatch):
    """A batch in the form that the native trainer takes. Samples with equal `group_id` share their prompt. `wanted`
    bool [T] marks the tokens to score (`wanted_tokens`). With `targets` int64 [T, K], the K token ids `targets[t]` are
    scored at each marked position t instead of the token there."""

    def __init__(self, data: RaggedBatch, wanted: Tensor, targets: Tensor | None = None) -> None:
        ids = data.tokens["input_ids"].to(torch.int64).contiguous()
        groups = torch.as_tensor(data.samples.get("group_id", torch.full((data.size,), -1)))  # -1: no shared prompt
        groups = groups.to(torch.int64).contiguous()
        super().__init__(ids, data.starts, data.lengths, wanted.contiguous(), groups, targets)
        self.data, self.wanted = data, wanted


def wanted_tokens(data: RaggedBatch) -> Tensor:
    """Return bool [T]: the tokens to score. These are the trained tokens of valid samples, or without masks all tokens,
    but never the first token of a sample."""
    wanted = torch.ones(data.num_tokens, dtype=torch.bool)
    if "token_mask" in data.tokens:
        wanted &= data.tokens["token_mask"] != 0
    if "sample_mask" in data.samples:
        wanted &= data.by_token(data.samples["sample_mask"] != 0)
    wanted[data.starts] = False
    return wanted


def plan(
    data: RaggedBatch,
    wanted: Tensor,
    rows: Iterable[int],
    batching: MicroBatching,
    apart: Tensor | None = None,
    targets: Tensor | None = None,
) -> tuple[RowBatch, list[list[int]]]:
    """Return (native batch, micro-batches): for each micro-batch of the samples `rows` (ascending), the indices of its
    samples. `wanted` (bool [T]) marks the tokens to score; `targets`, if given, are scored in their place (see
    `RowBatch`). Samples without a token to score are omitted. Those in `apart` (bool [B]) come last, separately."""
    batch = RowBatch(data, wanted, targets)
    used = (data.by_sample(wanted.int()) > 0).tolist()
    last = [False] * data.size if apart is None else apart.tolist()
    rows = [b for b in rows if used[b]]
    parts = [b for b in rows if not last[b]], [b for b in rows if last[b]]
    return batch, [micro for part in parts for micro in cut_rows(batch, part, batching)]


def cut_rows(batch: C.RowBatch, rows: list[int], batching: MicroBatching) -> Bins:
    """Split `rows` into micro-batches, and return them as lists of rows. `rows` is ascending, and each row has a token
    to score.

    With a token budget, a row longer than it gets a separate micro-batch. Dynamic batching groups rows of similar
    length, shortest first, so that (number of rows) x (longest length) is within the budget. Packed micro-batches are
    ordered by their first rows."""
    budget = batching.max_tokens
    if not budget or not rows:
        count = batching.max_samples or max(len(rows), 1)
        return [rows[begin : begin + count] for begin in range(0, len(rows), count)]
    if batching.length_round:
        lengths, width = batch.data.lengths.tolist(), min(batch.data.width, budget)
        own = [min(lengths[row], budget) for row in rows]
        found = C.plan_dynamic_batching(own, len(rows), 1, budget, batching.length_round, width)
        spans = [found.order[begin:end] for begin, end in found.micro_batch_indices[0] if end > begin]
        return [sorted(rows[place] for place in places) for places in spans]
    units, costs = C.prompt_units(batch, rows, budget, batching.share_prefix)
    chosen = PACKERS[batching.algorithm]([min(cost, budget) for cost in costs], budget)
    bins = sorted(sorted(row for unit in places for row in units[unit]) for places in chosen if places)
    if batching.largest_first:
        bins.sort(key=lambda rows: -C.packed_tokens(batch, rows, batching.share_prefix))  # a stable sort
    return bins


@dataclass
class MicroBatch:
    """Some samples of a batch, padded to the longest: `places` int64 [b, width] has the index of each position's token
    in the batch, `inside` bool [b, width] whether there is a token. `width` is at least 2."""

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
        """Return the values of this micro-batch's samples in `of_tokens` [T, ...], a tensor of the whole batch, as a
        tensor [b, width, ...] with 0 on padding."""
        picked = of_tokens[self.places]
        picked[~self.inside] = 0
        return picked

    def write(self, padded: Tensor, into: Tensor, first_column: int = 0) -> None:
        """Write `padded` [b, width - first_column], values of the b samples of this micro-batch, into `into` [T], at
        the places of their tokens in the batch. Column 0 of `padded` belongs to token `first_column` of each sample."""
        inside = self.inside[:, first_column:]
        into[self.places[:, first_column:][inside]] = padded[inside].to(into.dtype)

    def data(self, batch: RaggedBatch) -> dict[str, object]:
        """Return the fields of `batch` for the samples of this micro-batch, name -> value, with NeMo RL's names.
        Per-token tensors are padded; masks are float."""
        index = torch.tensor(self.rows)
        data: dict[str, object] = {name: self.padded(value) for name, value in batch.tokens.items()}
        data["input_lengths"] = batch.lengths[index].int()
        data |= {name: batch.of_samples(value, self.rows) for name, value in batch.samples.items()}
        for name in ("token_mask", "sample_mask"):
            data[name] = data[name].float()
        return data
