"""Rows of a global batch as micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C

from .bins import dynamic_bins, packed_bins


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


def padded_batch(data: Mapping[str, Any], wanted: Tensor) -> Any:
    """The native view of a padded batch; rows share prompts by `group_id` (none without that key)."""
    input_ids = data["input_ids"].to(torch.int64).contiguous()
    return C.PaddedBatch(input_ids, data["input_lengths"].to(torch.int64), wanted.contiguous(), _group_ids(data))


def _group_ids(data: Mapping[str, Any]) -> Tensor:
    groups = data.get("group_id")
    groups = torch.full((len(data["input_ids"]),), -1) if groups is None else torch.as_tensor(groups)
    return groups.to(torch.int64)


def wanted_tokens(data: Mapping[str, Any]) -> Tensor:
    """Bool [B, S]: trained tokens of rows that count; every token but the first of a row where no mask is given."""
    lengths, S = data["input_lengths"], data["input_ids"].shape[1]
    wanted = torch.arange(S)[None] < lengths[:, None]
    if "token_mask" in data:
        wanted = wanted & (data["token_mask"] != 0)
    if "sample_mask" in data:
        wanted = wanted & (data["sample_mask"] != 0)[:, None]
    wanted = wanted.clone()
    wanted[:, 0] = False
    return wanted


def plan(
    data: Mapping[str, Any], wanted: Tensor, begin: int, end: int, batching: MicroBatching, apart: Tensor | None = None
) -> tuple[Any, list[list[int]]]:
    """The native batch and its micro-batches (lists of rows of [begin, end)); rows without a wanted token are left out, and
    rows of `apart` (bool [B]) come last, in micro-batches of their own."""
    batch = padded_batch(data, wanted)
    used, last = wanted.any(1).tolist(), [False] * len(wanted) if apart is None else apart.tolist()
    rows = [b for b in range(begin, end) if used[b]]
    parts = [b for b in rows if not last[b]], [b for b in rows if last[b]]
    return batch, [micro for part in parts for micro in _micro_batches(batch, data, wanted, part, batching)]


def _micro_batches(
    batch: Any, data: Mapping[str, Any], wanted: Tensor, rows: list[int], batching: MicroBatching
) -> list[list[int]]:
    if not batching.max_tokens:
        return C.plan_micro_batches(batch, rows, batching.max_samples, 0, batching.share_prefix)
    input_ids, budget = data["input_ids"], batching.max_tokens
    if batching.length_round:
        return dynamic_bins(data["input_lengths"].tolist(), input_ids.shape[1], rows, budget, batching.length_round)
    given = input_ids, _group_ids(data), wanted
    bins, tokens = packed_bins(batch, given, rows, budget, batching.share_prefix, batching.algorithm)
    if batching.largest_first:
        bins = [bins[i] for i in sorted(range(len(bins)), key=lambda i: -tokens[i])]
    return bins


def select_rows(data: Mapping[str, Any], index: Tensor, width: int) -> dict[str, Any]:
    """The rows of a micro-batch; [B, S] tensors are cut to `width` columns, masks become float."""
    size, S = data["input_ids"].shape
    rows: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == size:
            picked = value[index]
            rows[key] = picked[:, :width] if picked.dim() > 1 and picked.shape[1] == S else picked
        elif isinstance(value, list) and len(value) == size:
            rows[key] = [value[i] for i in index.tolist()]
        else:
            rows[key] = value
    for key in ("token_mask", "sample_mask"):
        rows[key] = rows[key].float()
    return rows
