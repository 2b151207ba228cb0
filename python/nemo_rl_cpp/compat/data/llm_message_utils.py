"""NeMo RL's functions on message logs, those to flat tensors among them: one row of token ids a conversation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp.compat.data.interfaces import FlatMessagesType
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.prompt_place import fill_prompt


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


def get_keys_from_message_log(message_log: LLMMessageLogType, keys: Sequence[str]) -> LLMMessageLogType:
    """The same messages with only the named keys (those a message has)."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def add_loss_mask_to_message_log(
    batch_message_log: list[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Adds "token_loss_mask" to every message, in place: ones like token_ids for the trained roles, else zeros.

    With `only_unmask_final` only the last message of each log is trained on, whatever its role.
    """
    roles = {role.lower() for role in roles_to_train_on}
    for message_log in batch_message_log:
        for i, message in enumerate(message_log):
            trained = i == len(message_log) - 1 if only_unmask_final else message["role"] in roles
            like = torch.ones_like if trained else torch.zeros_like
            message["token_loss_mask"] = like(message["token_ids"])


def message_log_shape(message_log: LLMMessageLogType) -> list[dict[str, torch.Size]]:
    """The shapes of the tensors in each message."""
    return [{k: v.shape for k, v in message.items() if isinstance(v, Tensor)} for message in message_log]


def get_first_index_that_differs(str1: str, str2: str) -> int:
    """Index of the first character in which the texts differ; the shorter length when one begins the other."""
    for i, (a, b) in enumerate(zip(str1, str2)):
        if a != b:
            return i
    return min(len(str1), len(str2))


def get_formatted_message_log(
    message_log: LLMMessageLogType,
    tokenizer: TokenizerType,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    debug: bool = False,
) -> LLMMessageLogType:
    """The conversation with each message's "content" replaced by its piece of the chat template's text, and
    "token_ids" (int64) added.

    The prompt of `task_data_spec` wraps the first message, its system prompt goes in front. A message's piece is what
    the template's text gains when the message is added. `add_bos_token` and `add_eos_token` put the token at the very
    beginning and end unless it is there (line breaks may follow it: Qwen's templates end so); `add_generation_prompt` adds the assistant's opening to user and tool
    messages.
    """
    messages = [dict(message) for message in message_log]
    if task_data_spec.prompt:
        messages[0] = {"role": "user", "content": fill_prompt(task_data_spec.prompt, messages[0]["content"])}
    if task_data_spec.system_prompt:
        messages.insert(0, {"role": "system", "content": task_data_spec.system_prompt})

    formatted: LLMMessageLogType = []
    before = ""
    for i, message in enumerate(messages):
        text = tokenizer.apply_chat_template(
            messages[: i + 1],
            add_generation_prompt=add_generation_prompt and message["role"] in ("user", "tool"),
            tokenize=False,
            add_special_tokens=False,
            tools=tools,
        )
        # A template may close the last message (with eos, say) and reopen it when another follows.
        piece = text[get_first_index_that_differs(before, text) :]
        if i == 0 and add_bos_token:
            piece = _with_token(piece, tokenizer.bos_token, "BOS", at_start=True)
        if i == len(messages) - 1 and add_eos_token:
            piece = _with_token(piece, tokenizer.eos_token, "EOS", at_start=False)
        if debug:
            print(f"message {i} ({message['role']}): {piece!r}")
        ids = tokenizer(piece, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        # An empty text comes as a float tensor from some tokenizers.
        formatted.append({**message, "token_ids": ids.to(torch.int64), "content": piece})
        before = text
    return formatted


def _with_token(text: str, token: str | None, name: str, at_start: bool) -> str:
    if token is None:
        warnings.warn(
            f"add_{name.lower()}_token is True but the tokenizer does not have a {name} token. "
            f"Skipping {name} token addition.",
            stacklevel=3,
        )
        return text
    if at_start:
        return text if text.startswith(token) else token + text
    return text if text.rstrip("\n").endswith(token) else text + token


def remap_dataset_keys(dataset: Any, mapping_dict: dict[str, str]) -> Any:
    """The data set with columns renamed from `mapping_dict`'s keys to its values; itself if nothing changes."""
    if all(old == new for old, new in mapping_dict.items()):
        return dataset
    return dataset.map(
        lambda row: {new: row[old] for old, new in mapping_dict.items()}, remove_columns=list(mapping_dict)
    )
