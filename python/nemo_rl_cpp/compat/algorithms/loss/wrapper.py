"""Losses on packed sequences."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.compat.distributed.model_utils import require_single_process

_MINIMA = frozenset({"probs_ratio_min", "probs_ratio_clamped_min"})
_MAXIMA = frozenset({"probs_ratio_max", "probs_ratio_clamped_max"})


class _PackedLoss:
    """What both wrappers are made of: the loss, how to prepare its input, and where each sequence lies."""

    def __init__(
        self,
        loss_fn: LossFunction,
        prepare_fn: Callable[..., Any],
        cu_seqlens_q: Tensor | Sequence[int],
        cu_seqlens_q_padded: Tensor | Sequence[int] | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: torch.distributed.ProcessGroup | None = None,
        context_parallel_group: torch.distributed.ProcessGroup | None = None,
    ):
        require_single_process(vocab_parallel_group, "vocab_parallel_group")
        require_single_process(context_parallel_group, "context_parallel_group")
        self.loss_fn = loss_fn
        self.prepare_fn = prepare_fn
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_q_padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        self.vocab_parallel_rank = vocab_parallel_rank
        self.vocab_parallel_group = vocab_parallel_group
        self.context_parallel_group = context_parallel_group

    def _groups(self) -> dict[str, Any]:
        return {
            "vocab_parallel_rank": self.vocab_parallel_rank,
            "vocab_parallel_group": self.vocab_parallel_group,
            "context_parallel_group": self.context_parallel_group,
        }


class SequencePackingLossWrapper(_PackedLoss):
    """Calls the loss once a sequence of packed logits [1, T, V] and adds the results.

    The sum equals the unpacked loss, since a loss divides by global counts; only a positive-example NLL needs
    `global_valid_positive_toks` in the data for that (else each sequence divides by its own count, as in NeMo RL).
    Extrema are merged, infinite ones (sequences without a valid token) skipped.
    """

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        ends = [int(v) for v in self.cu_seqlens_q]
        padded = [int(v) for v in self.cu_seqlens_q_padded]
        total: Any = 0
        metrics: dict[str, Any] = {}
        for i, (start, end) in enumerate(zip(padded[:-1], padded[1:], strict=True)):
            sequence = _row(data, i, ends[i + 1] - ends[i])
            logits = next_token_logits[:, start : min(end, next_token_logits.shape[1])]
            loss_input, sequence = self.prepare_fn(logits=logits, data=sequence, loss_fn=self.loss_fn, **self._groups())
            loss, found = self.loss_fn(
                data=sequence, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks, **loss_input
            )
            total = total + loss
            _merge(metrics, found)
        return total, metrics


class SequencePackingFusionLossWrapper(_PackedLoss):
    """Prepares the log-probs of all packed sequences at once and calls the loss once; the results are the same.

    `prepare_fn` is prepare_packed_loss_input or takes its arguments.
    """

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        loss_input, data = self.prepare_fn(
            logits=next_token_logits,
            data=data,
            loss_fn=self.loss_fn,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_q_padded=self.cu_seqlens_q_padded,
            **self._groups(),
        )
        return self.loss_fn(
            data=data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks, **loss_input
        )


def _row(data: Mapping[str, Any], i: int, length: int) -> dict[str, Any]:
    """Row i of each entry, token columns cut to `length`; scalars stay."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            value = value[i : i + 1]
            out[key] = value[:, :length] if value.ndim > 1 and value.shape[1] > 1 else value
        else:
            out[key] = value[i : i + 1] if isinstance(value, list) else value
    return out


def _merge(metrics: dict[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if name in _MINIMA or name in _MAXIMA:
            best, worst = (min, math.inf) if name in _MINIMA else (max, -math.inf)
            metrics.setdefault(name, worst)
            if not math.isinf(value):
                metrics[name] = best(metrics[name], value)
        else:
            metrics[name] = metrics.get(name, 0) + value
