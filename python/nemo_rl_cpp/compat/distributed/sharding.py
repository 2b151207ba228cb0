"""How a batch is split over shards: plainly, by length (dynamic batching), or by bins (sequence packing)."""

import math
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.compat.data.packing import get_packer

if TYPE_CHECKING:
    from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict

    Shards = list[SlicedDataDict]


class BatchError(ValueError, AssertionError):
    """A batch and a request that do not fit; also an AssertionError, which is what NeMo RL raises here."""


class SequencePackingArgs(TypedDict):
    """How `shard_by_batch_size` packs sequences into micro-batches."""

    max_tokens_per_microbatch: int
    """capacity of a bin, in tokens after padding each sequence to `sequence_length_pad_multiple`"""
    input_key: str
    input_lengths_key: str
    algorithm: str
    """a name of `nemo_rl_cpp.compat.data.packing.PackingAlgorithm`"""
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]
    sequence_length_pad_multiple: int


class DynamicBatchingArgs(TypedDict):
    """How `shard_by_batch_size` forms micro-batches of similar lengths under a token budget."""

    max_tokens_per_microbatch: int
    """upper bound of rows x padded length in one micro-batch"""
    sequence_length_round: int
    """micro-batch lengths are rounded up to a multiple of this"""
    input_key: str
    input_lengths_key: str


def shard_plain(batch: "BatchedDataDict", shards: int, batch_size: int) -> "Shards":
    """Shard i: rows [i*s, (i+1)*s) of every chunk, s = ceil(batch_size / shards)."""
    return [batch.part(rows) for rows in _plain_rows(batch.size, shards, batch_size)]


def shard_dynamic(
    batch: "BatchedDataDict", shards: int, batch_size: int, args: DynamicBatchingArgs
) -> "tuple[Shards, list[int]]":
    """Rows sorted by length within a chunk and dealt out in turn; micro-batches common to all shards."""
    if batch_size % shards:
        raise BatchError(f"dynamic batching needs equal shards, but {batch_size} rows do not split over {shards}")
    plan = C.plan_dynamic_batching(
        _lengths(batch, args["input_lengths_key"]),
        batch_size,
        shards,
        args["max_tokens_per_microbatch"],
        args["sequence_length_round"],
        batch[args["input_key"]].shape[1],
    )
    rows = [[plan.order[position] for position in shard] for shard in _plain_rows(batch.size, shards, batch_size)]
    parts = [batch.part(shard_rows) for shard_rows in rows]
    for part in parts:
        part.micro_batch_indices = [[list(span) for span in chunk] for chunk in plan.micro_batch_indices]
        part.micro_batch_lengths = [list(chunk) for chunk in plan.micro_batch_lengths]
    return parts, plan.order


def shard_packed(
    batch: "BatchedDataDict", shards: int, batch_size: int, args: SequencePackingArgs
) -> "tuple[Shards, list[int]]":
    """Bins of every chunk dealt out in turn: bin j goes to shard j mod shards."""
    order = args.get("microbatch_order")
    if order not in (None, "packer", "largest_first"):
        raise ValueError(f"microbatch_order is {order!r}; it must be 'packer' or 'largest_first'")
    packer = get_packer(
        args["algorithm"], args["max_tokens_per_microbatch"], min_bin_count=shards, bin_count_multiple=shards
    )
    multiple = args["sequence_length_pad_multiple"]
    padded = [-(-length // multiple) * multiple for length in _lengths(batch, args["input_lengths_key"])]
    rows: list[list[int]] = [[] for _ in range(shards)]
    indices: list[list[list[list[int]]]] = [[] for _ in range(shards)]
    lengths: list[list[list[int]]] = [[] for _ in range(shards)]
    counts: list[list[int]] = [[] for _ in range(shards)]
    for start in range(0, batch.size, batch_size):
        bins = [[start + i for i in members] for members in packer.pack(padded[start : start + batch_size])]
        for shard in range(shards):
            own = [(members, sum(padded[i] for i in members)) for members in bins[shard::shards]]
            if order == "largest_first":
                own.sort(key=lambda bin_: -bin_[1])
            ends = [0]
            for members, _ in own:
                rows[shard] += members
                ends.append(ends[-1] + len(members))
            indices[shard].append([[a, b] for a, b in zip(ends, ends[1:])])
            lengths[shard].append([tokens for _, tokens in own])
            counts[shard].append(ends[-1])
    parts = [batch.part(shard_rows) for shard_rows in rows]
    for shard, part in enumerate(parts):
        part.micro_batch_indices = indices[shard]
        part.micro_batch_lengths = lengths[shard]
        part.elem_counts_per_gb = counts[shard]
    return parts, [row for shard_rows in rows for row in shard_rows]


def _plain_rows(rows: int, shards: int, batch_size: int) -> list[list[int]]:
    shard_size = math.ceil(batch_size / shards)
    starts = range(0, rows, batch_size) if batch_size else []
    return [
        [
            row
            for start in starts
            for row in range(start + min(i * shard_size, batch_size), start + min((i + 1) * shard_size, batch_size))
        ]
        for i in range(shards)
    ]


def _lengths(batch: "BatchedDataDict", key: str) -> list[int]:
    lengths = batch[key]
    return lengths.tolist() if torch.is_tensor(lengths) else [int(length) for length in lengths]
