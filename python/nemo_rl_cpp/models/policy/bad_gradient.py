"""Which sample and token a gradient that is not finite comes from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.policy.micro_batches import wanted_tokens
from nemo_rl_cpp.models.policy.train_step import NonFiniteError


def first_bad_gradient(trainer: C.Trainer, data: RaggedBatch, begin: int, end: int, run: Callable[..., object]) -> str:
    """Where a gradient that is not finite comes from: " (it comes from sample 3, token 7)", or "" where no sample alone gives one.

    Samples, then tokens, are tried by halves, `run(data, begin, end)` forward and backward each, since the sum over a batch does
    not say it. The trainer's gradients are lost.
    """

    def is_bad(rows: range, mask: Tensor) -> bool:
        trainer.zero_grad()
        tried = data.copy()
        tried.tokens["token_mask"] = mask
        try:
            run(tried, rows.start, rows.stop)
        except NonFiniteError:
            return True
        return not trainer.grads_are_finite()

    rows, mask = range(begin, end), data.tokens["token_mask"]
    if not is_bad(rows, mask):
        return ""
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if is_bad(half, mask) else rows[len(half) :]
    start, stop = int(data.offsets[rows.start]), int(data.offsets[rows.stop])
    tokens = start + wanted_tokens(data)[start:stop].nonzero().flatten()
    while len(tokens) > 1:
        half = tokens[: len(tokens) // 2]
        only = torch.zeros_like(mask)
        only[half] = mask[half]
        tokens = half if is_bad(rows, only) else tokens[len(half) :]
    return f" (it comes from sample {rows.start}, token {int(tokens[0]) - start})" if len(tokens) else ""
