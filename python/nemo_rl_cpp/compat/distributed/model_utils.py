"""Log-probabilities from logits, in one process. Names and results are NeMo RL's; a vocabulary or a context split over
several processes is an error that says so (the native trainer computes its log-probs itself, without logits)."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp.compat.algorithms.logits_sampling_utils import (
    TrainingSamplingParams,
    apply_top_k_top_p,
    need_top_k_or_top_p_filtering,
)


def require_single_process(group: Any, name: str) -> None:
    """Raises NotImplementedError unless `group` is None or has one member."""
    if group is None:
        return
    size = group.size() if hasattr(group, "size") else torch.distributed.get_world_size(group)
    if size > 1:
        raise NotImplementedError(
            f"{name} has {size} members; log-probs from logits work within one process: pass None"
        )


def _selected_logprobs(
    logits: Tensor, target: Tensor, sampling_params: TrainingSamplingParams | None, chunk_size: int | None
) -> Tensor:
    """float32 log-softmax of logits [B, S, V] at target [B, S], `chunk_size` positions at a time."""
    outputs = []
    step = chunk_size or max(1, logits.shape[1])
    for start in range(0, logits.shape[1], step):
        part = logits[:, start : start + step].to(torch.float32)
        if need_top_k_or_top_p_filtering(sampling_params):
            part, _ = apply_top_k_top_p(part, top_k=sampling_params.top_k, top_p=sampling_params.top_p)
        index = target[:, start : start + step].to(device=part.device, dtype=torch.long).unsqueeze(-1)
        outputs.append(part.gather(-1, index).squeeze(-1) - part.logsumexp(-1))
    return torch.cat(outputs, 1) if outputs else logits.new_zeros(logits.shape[:2], dtype=torch.float32)


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: torch.distributed.ProcessGroup | None = None,
    context_parallel_group: torch.distributed.ProcessGroup | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """[B, S-1] float32: column t is the log-prob of input_ids[:, t+1] under logits [B, S, V] at t.

    A token that top-k or top-p removed has -inf. `chunk_size` bounds how many positions are cast at once.
    """
    require_single_process(vocab_parallel_group, "vocab_parallel_group")
    require_single_process(context_parallel_group, "context_parallel_group")
    if seq_index is not None:
        raise NotImplementedError("seq_index (context parallelism) is not supported; pass None")
    width = min(input_ids.shape[1], next_token_logits.shape[1] + 1) - 1
    return _selected_logprobs(next_token_logits[:, :width], input_ids[:, 1 : width + 1], sampling_params, chunk_size)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: torch.distributed.ProcessGroup | None,
    inference_only: bool = False,
    cp_group: torch.distributed.ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """[B, S-1] float32 log-probs of `target` [B, S] (unshifted) under logits [B, S, V] that hold the whole vocabulary."""
    _whole_vocabulary(vocab_parallel_logits, vocab_start_index, vocab_end_index, tp_group, cp_group)
    logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
    return _selected_logprobs(logits[:, : target.shape[1] - 1], target[:, 1:], sampling_params, chunk_size)


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: torch.distributed.ProcessGroup | None,
    inference_only: bool = False,
    cp_group: torch.distributed.ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """[B, unpacked_seqlen - 1] float32 from packed logits [1, T, V] and target [1, T] (or [T]): row b holds the log-probs of
    sequence b's tokens after its first, 0 after its (padded) end. `target_is_pre_rolled`: column t already holds
    the token that position t predicts.
    """
    _whole_vocabulary(vocab_parallel_logits, vocab_start_index, vocab_end_index, group, cp_group)
    logits = vocab_parallel_logits.detach() if inference_only else vocab_parallel_logits
    logits = logits if logits.ndim == 3 else logits.unsqueeze(0)
    target = target.reshape(1, -1)
    ends = [int(v) for v in cu_seqlens_padded]
    rows = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        count = min(end - start, unpacked_seqlen) - 1
        first = start if target_is_pre_rolled else start + 1
        row = _selected_logprobs(
            logits[:, start : start + count], target[:, first : first + count], sampling_params, chunk_size
        )
        rows.append(torch.nn.functional.pad(row, (0, unpacked_seqlen - 1 - count)))
    return torch.cat(rows, 0)


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: Tensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
) -> Tensor:
    """[B, S-1] float32 log-probs from logits [B, S, V] in one process (a DTensor must not be split)."""
    logits = vocab_parallel_logits
    if hasattr(logits, "full_tensor"):
        if logits.device_mesh.size() > 1:
            raise NotImplementedError("the logits are split over several processes; gather them first")
        logits = logits.to_local()
    ids = input_ids.to_local() if hasattr(input_ids, "to_local") else input_ids
    return get_next_token_logprobs_from_logits(
        ids, logits, seq_index, chunk_size=chunk_size, sampling_params=sampling_params
    )


def _whole_vocabulary(logits: Tensor, start: int, end: int, tp_group: Any, cp_group: Any) -> None:
    require_single_process(tp_group, "tp_group")
    require_single_process(cp_group, "cp_group")
    if start != 0 or end != logits.shape[-1]:
        raise ValueError(
            f"vocabulary range [{start}, {end}) with logits of {logits.shape[-1]} columns; expected the whole vocabulary"
        )
