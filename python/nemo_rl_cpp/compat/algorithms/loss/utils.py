"""From a model's logits to what a loss function takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl_cpp.algorithms.loss import LossFunction, LossInputType
from nemo_rl_cpp.compat.algorithms.logits_sampling_utils import TrainingSamplingParams, need_top_k_or_top_p_filtering
from nemo_rl_cpp.compat.algorithms.utils import mask_out_neg_inf_logprobs
from nemo_rl_cpp.compat.distributed.model_utils import (
    from_parallel_logits_to_logprobs_packed_sequences,
    get_next_token_logprobs_from_logits,
    require_single_process,
)


def prepare_loss_input(
    logits: torch.Tensor,
    data: Mapping[str, Any],
    loss_fn: LossFunction,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: torch.distributed.ProcessGroup | None = None,
    context_parallel_group: torch.distributed.ProcessGroup | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    d2t: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(keyword arguments for `loss_fn`, data): the logits themselves, or log-probs [B, S-1] of data["input_ids"].

    With top-k or top-p the log-probs are of the filtered distribution, 0 where a token fell out of it, and the data
    gains `curr_logprobs_unfiltered` for a loss with a KL term. Raises ValueError for another kind of loss.
    """
    _no_draft(d2t)
    if loss_fn.input_type == LossInputType.LOGIT:
        return {"logits": logits}, data
    if loss_fn.input_type != LossInputType.LOGPROB:
        raise ValueError(f"a loss with input_type {loss_fn.input_type} is not supported; expected LOGIT or LOGPROB")
    if getattr(loss_fn, "use_fused_linear_logprobs", False):
        logprobs = logits.to(torch.float32)[:, : data["input_ids"].shape[1] - 1]
        return {"next_token_logprobs": logprobs}, data

    def logprobs_of(params: TrainingSamplingParams | None) -> torch.Tensor:
        return get_next_token_logprobs_from_logits(
            input_ids=data["input_ids"],
            next_token_logits=logits,
            vocab_parallel_rank=vocab_parallel_rank,
            vocab_parallel_group=vocab_parallel_group,
            context_parallel_group=context_parallel_group,
            sampling_params=params,
            chunk_size=chunk_size,
        )

    return {"next_token_logprobs": _filtered(logprobs_of, data, loss_fn, sampling_params)}, data


def prepare_packed_loss_input(
    logits: torch.Tensor,
    data: Mapping[str, Any],
    loss_fn: LossFunction,
    cu_seqlens_q: torch.Tensor | Sequence[int],
    cu_seqlens_q_padded: torch.Tensor | Sequence[int],
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: torch.distributed.ProcessGroup | None = None,
    context_parallel_group: torch.distributed.ProcessGroup | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    chunk_size: int | None = None,
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The same from packed logits [1, T, V]: log-probs [B, S-1] in the layout of the unpacked data, 0 past each end."""
    if loss_fn.input_type != LossInputType.LOGPROB:
        raise ValueError(f"packed logits need a loss with input_type LOGPROB; got {loss_fn.input_type}")
    require_single_process(vocab_parallel_group, "vocab_parallel_group")
    require_single_process(context_parallel_group, "context_parallel_group")
    ids = data["input_ids"]
    lengths = _differences(cu_seqlens_q)
    packed = pack_rows(ids, lengths, cu_seqlens_q_padded)

    def logprobs_of(params: TrainingSamplingParams | None) -> torch.Tensor:
        rows = from_parallel_logits_to_logprobs_packed_sequences(
            logits,
            packed,
            torch.as_tensor(cu_seqlens_q_padded),
            ids.shape[1],
            0,
            logits.shape[-1],
            vocab_parallel_group,
            inference_only=False,
            cp_group=context_parallel_group,
            chunk_size=chunk_size,
            sampling_params=params,
        )
        keep = (
            torch.arange(rows.shape[1], device=rows.device)[None, :]
            < (torch.tensor(lengths, device=rows.device) - 1)[:, None]
        )
        return torch.where(keep, rows, torch.zeros_like(rows))

    return {"next_token_logprobs": _filtered(logprobs_of, data, loss_fn, sampling_params)}, data


def pack_rows(
    rows: torch.Tensor, lengths: Sequence[int], cu_seqlens_padded: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """[1, T] from rows [B, S]: row b's first lengths[b] values at its padded offset, 0 elsewhere."""
    starts = [int(v) for v in cu_seqlens_padded]
    packed = rows.new_zeros((1, starts[-1]))
    for b, length in enumerate(lengths):
        packed[0, starts[b] : starts[b] + length] = rows[b, :length]
    return packed


def _filtered(
    logprobs_of: Any, data: Any, loss_fn: Any, sampling_params: TrainingSamplingParams | None
) -> torch.Tensor:
    logprobs = logprobs_of(sampling_params)
    if not need_top_k_or_top_p_filtering(sampling_params):
        return logprobs
    mask = (data["token_mask"] * data["sample_mask"].unsqueeze(-1))[:, 1:]
    logprobs = mask_out_neg_inf_logprobs(logprobs, mask, "curr_logprobs")
    if getattr(loss_fn, "reference_policy_kl_penalty", 0) != 0:
        data["curr_logprobs_unfiltered"] = logprobs_of(None)
    return logprobs


def _differences(cu_seqlens: torch.Tensor | Sequence[int]) -> list[int]:
    ends = [int(v) for v in cu_seqlens]
    return [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]


def _no_draft(d2t: torch.Tensor | None) -> None:
    if d2t is not None:
        raise NotImplementedError("d2t (draft models) is not supported; pass d2t=None")
