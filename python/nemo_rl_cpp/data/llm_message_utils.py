"""Message logs to flat tensors.

A message log keeps a conversation turn by turn; the trainer wants one row of token ids a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_rl_cpp.data.interfaces import FlatMessagesType, LLMMessageLogType

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> FlatMessagesType:
    """By key over the messages that have it: tensors concatenated along dim 0, everything else as a list.

    An empty log gives an empty dictionary. RuntimeError when the tensors of a key differ in rank.
    """
    columns: dict[str, list[Any]] = {}
    for message in message_log:
        for key, value in message.items():
            columns.setdefault(key, []).append(value)
    flat: FlatMessagesType = {}
    for key, values in columns.items():
        if not isinstance(values[0], Tensor):
            flat[key] = values
            continue
        if len({value.dim() for value in values}) > 1:
            raise RuntimeError(
                f"tensors for key={key!r} must have same number of dimensions: "
                f"{[tuple(value.shape) for value in values]}"
            )
        flat[key] = torch.cat(values)
    return flat


def _validate_tensor_consistency(tensors: list[Tensor]) -> None:
    """Rows of one batch tensor must agree: silently widening token ids to floats would hide a mistake."""
    for wanted, of in (
        ("consistent types", lambda t: t.dtype),
        ("tensors on the same device", lambda t: t.device),
        ("tensors of the same trailing shape", lambda t: tuple(t.shape[1:])),
    ):
        kinds = sorted({str(of(tensor)) for tensor in tensors})
        if len(kinds) > 1:
            raise RuntimeError(f"expected {wanted} but got {', '.join(kinds)}")


def _batch(key: str, rows: list[Tensor | None], width: int, pad: float) -> Tensor:
    """Rows right-padded to `width` and stacked; a conversation without the key is all padding."""
    present = [row for row in rows if row is not None]
    try:
        _validate_tensor_consistency(present)
    except RuntimeError as error:
        raise RuntimeError(f"key={key!r}: {error}") from None
    out = present[0].new_full((len(rows), width, *present[0].shape[1:]), pad)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = row
    return out


def batched_message_log_to_flat_message(
    message_log_batch: list[LLMMessageLogType],
    pad_value_dict: Mapping[str, int] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict, Tensor]:
    """A batch of conversations as one row each.

    Per key the turns are concatenated and the rows right-padded, with `pad_value_dict[key]` or 0, to the longest row,
    rounded up to a multiple of `make_sequence_length_divisible_by`. Keys that hold no tensors become a list a
    conversation. Returns (BatchedDataDict, int32 lengths [B] without padding). An empty batch gives an empty
    BatchedDataDict, a batch without any tensor the first value of each key a conversation; both come with an empty
    float tensor. RuntimeError when dtypes or devices are mixed under one key.
    """
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict

    if not message_log_batch:
        return BatchedDataDict(), torch.empty(0)
    flats = [message_log_to_flat_messages(log) for log in message_log_batch]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    if not any(isinstance(value, Tensor) for flat in flats for value in flat.values()):
        return BatchedDataDict(
            {key: [flat[key][0] if key in flat else None for flat in flats] for key in keys}
        ), torch.empty(0)
    lengths = [max((len(v) for v in flat.values() if isinstance(v, Tensor)), default=0) for flat in flats]
    width = max(lengths)
    step = make_sequence_length_divisible_by
    if step > 1:
        width = (width + step - 1) // step * step
    result: BatchedDataDict = BatchedDataDict()
    for key in keys:
        rows = [flat.get(key) for flat in flats]
        if any(isinstance(row, Tensor) for row in rows):
            mixed = [type(row).__name__ for row in rows if row is not None and not isinstance(row, Tensor)]
            if mixed:
                raise RuntimeError(f"key={key!r} holds tensors in some conversations and {mixed[0]} in others")
            result[key] = _batch(key, rows, width, (pad_value_dict or {}).get(key, 0))
        else:
            result[key] = rows
    return result, torch.tensor(lengths, dtype=torch.int32)
