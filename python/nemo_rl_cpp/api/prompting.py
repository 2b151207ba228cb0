"""Rows of a call as a data set: prompts tokenised, each with room to answer."""

from collections.abc import Mapping, Sequence

import torch

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.conversation import prompt_of, tools_of
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset
from nemo_rl_cpp.data.interfaces import DatumSpec, Message, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.prompt_rendering import render_prompt

TASK = "notebook"
Prompt = str | Sequence[Mapping[str, object]]


def dataset_of(
    rows: list[Row], tokenizer: TokenizerType, limit: int, name: str = "prompt", limit_name: str = "max_length"
) -> AllTaskProcessedDataset:
    """The rows as what a run takes. ValueError for the first prompt that leaves no room to answer within `limit`."""
    _check_room(rows, name, tokenizer, limit, limit_name)
    return AllTaskProcessedDataset(ListDataset(rows), tokenizer, TaskDataSpec(TASK), _processor, max_seq_length=limit)


def prompt_message(prompt: Prompt, tokenizer: TokenizerType, tools: list[dict[str, object]] | None = None) -> Message:
    """A text as it is, or a conversation through the chat template, with its token ids."""
    messages = None if isinstance(prompt, str) else list(prompt)
    text = prompt if messages is None else render_prompt(tokenizer, messages, tools=tools)
    ids = torch.tensor(prompt_ids(tokenizer, text, messages), dtype=torch.int64)
    return {"role": "user", "content": text, "token_ids": ids}


def _processor(
    row: Row, spec: TaskDataSpec, tokenizer: TokenizerType, max_seq_length: int | None, idx: int
) -> DatumSpec:
    message = prompt_message(prompt_of(row["prompt"], f"prompt {idx}"), tokenizer, tools_of(row))
    length = len(message["token_ids"])
    columns = {key: value for key, value in row.items() if key != "prompt"}
    return DatumSpec(
        message_log=[message], length=length, extra_env_info=columns, loss_multiplier=1.0, idx=idx, task_name=TASK
    )


def _check_room(rows: list[Row], name: str, tokenizer: TokenizerType, limit: int, limit_name: str) -> None:
    """ValueError for the first prompt that the template refuses or that leaves no room to answer, before a model is loaded."""
    for i, row in enumerate(rows):
        prompt = prompt_of(row["prompt"], f"{name} {i}")
        if isinstance(prompt, str) and len(prompt.encode()) < limit // 2:  # a token is a byte at least, but for BOS
            continue
        try:
            length = len(prompt_message(prompt, tokenizer, tools_of(row))["token_ids"])
        except ValueError as error:
            raise ValueError(f"{name} {i}: {error}") from error
        if length >= limit:
            raise ValueError(
                f"{name} {i} has {length} tokens, which leaves no room to answer within {limit_name}={limit}"
            )
