"""Padded tensors in the native core's format of a batch."""

import torch
from nemo_rl_cpp._native import C
from torch import Tensor


def padded_rows(
    ids: Tensor, lengths: Tensor, mask: Tensor, groups: Tensor, targets: Tensor | None = None
) -> C.RowBatch:
    """Return a batch of the native core.

    Args:
        ids: int64 [B, S], padded on the right.
        lengths, groups: [B].
        mask: bool [B, S].
        targets: int64 [B S, K]."""
    size, width = ids.shape
    return C.RowBatch(ids, torch.arange(size) * width, lengths, mask, groups, targets)
