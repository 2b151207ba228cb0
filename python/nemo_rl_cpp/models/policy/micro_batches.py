"""Rows of a global batch as micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch

from .bins import Prompts, dynamic_bins, packed_bins


@dataclass(frozen=True)
class MicroBatching:
    """How rows are cut into micro-batches: by samples, or by a budget of tokens.

    With a budget, rows are packed by `algorithm` (`sequence_packing`), or, with `length_round` > 0, put together by their
    lengths, which count rounded up to a multiple of it (`dynamic_batching`).
    """

    max_samples: int = 0
    max_tokens: int = 0
    algorithm: str = "modified_first_fit_decreasing"
    largest_first: bool = False
    length_round: int = 0
    share_prefix: bool = True
    checkpoint: bool = False


class RowBatch(C.RowBatch):
    """The native view of a batch, and the batch; samples share prompts by `group_id` (none without that name).

    Attributes:
        data: the batch.
        wanted: bool [T], see `wanted_tokens`.
    """

    def __init__(self, data: RaggedBatch, wanted: Tensor) -> None:
        ids = data.tokens["input_ids"].to(torch.int64).contiguous()
        super().__init__(ids, data.starts, data.lengths, wanted.contiguous(), group_ids(data))
        self.data, self.wanted = data, wanted
        self._by_sample = data.rows(wanted)

    def wanted_of(self, row: int) -> Tensor:
        """Bool [its length]: the wanted tokens of a sample."""
        return self._by_sample[row]


def group_ids(data: RaggedBatch) -> Tensor:
    """int64 [B], -1 without `group_id`: such samples share with none."""
    groups = data.samples.get("group_id")
    groups = torch.full((data.size,), -1) if groups is None else torch.as_tensor(groups)
    return groups.to(torch.int64).contiguous()


def wanted_tokens(data: RaggedBatch) -> Tensor:
    """Bool [T]: trained tokens of samples that count; every token but the first of a sample where no mask is given."""
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
    """The native batch and the micro-batches of `rows`, ascending samples; those without a wanted token are left out, and those
    of `apart` (bool [B]) come last, in micro-batches of their own."""
    batch = RowBatch(data, wanted)
    used = (data.by_sample(wanted.int()) > 0).tolist()
    last = [False] * data.size if apart is None else apart.tolist()
    rows = [b for b in rows if used[b]]
    parts = [b for b in rows if not last[b]], [b for b in rows if last[b]]
    return batch, [micro for part in parts for micro in _micro_batches(batch, data, wanted, part, batching)]


def _micro_batches(
    batch: RowBatch, data: RaggedBatch, wanted: Tensor, rows: list[int], batching: MicroBatching
) -> list[list[int]]:
    if not batching.max_tokens:
        return C.plan_micro_batches(batch, rows, batching.max_samples, 0, batching.share_prefix)
    budget = batching.max_tokens
    if batching.length_round:
        return dynamic_bins(data.lengths.tolist(), data.width, rows, budget, batching.length_round)
    prompts = Prompts(data.rows(data.tokens["input_ids"]), data.rows(wanted), group_ids(data).tolist())
    bins, tokens = packed_bins(batch, prompts, rows, budget, batching.share_prefix, batching.algorithm)
    if batching.largest_first:
        bins = [bins[i] for i in sorted(range(len(bins)), key=lambda i: -tokens[i])]
    return bins


@dataclass
class MicroBatch:
    """Some samples of a batch as a loss sees them: padded to the longest of them.

    Attributes:
        rows: which samples.
        width: tokens of the longest, at least 2.
        places: int64 [b, width] which token of the batch stands there.
        inside: bool [b, width] whether one does.
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
        """[T, ...] of the batch -> [b, width, ...], 0 behind the end of a sample."""
        picked = of_tokens[self.places]
        picked[~self.inside] = 0
        return picked

    def write(self, padded: Tensor, into: Tensor, first_column: int = 0) -> None:
        """Puts [b, width - first_column] where it belongs in [T]."""
        inside = self.inside[:, first_column:]
        into[self.places[:, first_column:][inside]] = padded[inside].to(into.dtype)

    def data(self, batch: RaggedBatch) -> dict[str, object]:
        """All that the batch says of these samples, by NeMo RL's names; masks are float."""
        index = torch.tensor(self.rows)
        data: dict[str, object] = {name: self.padded(value) for name, value in batch.tokens.items()}
        data["input_lengths"] = batch.lengths[index].int()
        data |= {name: batch.of_samples(value, self.rows) for name, value in batch.samples.items()}
        for name in ("token_mask", "sample_mask"):
            data[name] = data[name].float()
        return data
