"""Processors: a row of a data set to a tokenised prompt with what its environment needs.

Each takes (datum_dict, task_data_spec, tokenizer, max_seq_length, idx) and gives a DatumSpec. Configurations name them;
`register_processor` adds one.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.interfaces import (
    DatumSpec,
    LLMMessageLogType,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)

TokenizerLike = TokenizerType


def _message(
    tokenizer: TokenizerLike, role: str, messages: list[dict[str, str]], add_generation_prompt: bool, begins: bool = True
) -> dict[str, Any]:
    """One entry of a message log from the chat template's text of `messages`; `begins`: it is the first."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, add_special_tokens=False
    )
    ids = prompt_ids(tokenizer, text, messages) if begins else tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"role": role, "content": text, "token_ids": torch.tensor(ids, dtype=torch.int64)}


def _datum(
    datum_dict: dict[str, Any],
    message_log: LLMMessageLogType,
    extra_env_info: dict[str, Any],
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """The DatumSpec. A prompt of `max_seq_length` tokens or more leaves no room to answer: it is cut to a few tokens,
    so that it costs nothing, and masked out of the loss; `length` keeps the true length."""
    length = sum(len(message["token_ids"]) for message in message_log)
    loss_multiplier = 1.0
    if max_seq_length is not None and length >= max_seq_length:
        keep = min(4, max_seq_length // len(message_log))
        for message in message_log:
            message["token_ids"] = message["token_ids"][:keep]
        loss_multiplier = 0.0
    datum: DatumSpec = {
        "message_log": message_log,
        "length": length,
        "extra_env_info": extra_env_info,
        "loss_multiplier": loss_multiplier,
        "idx": idx,
    }
    for key in ("task_name", "stop_strings"):
        if datum_dict.get(key) is not None:
            datum[key] = datum_dict[key]
    return datum


def _separate_messages(question: str, spec: TaskDataSpec, tokenizer: TokenizerLike) -> LLMMessageLogType:
    """System and user message as two entries, each with its own run of the chat template."""
    log: LLMMessageLogType = []
    if spec.system_prompt:
        log.append(_message(tokenizer, "system", [{"role": "system", "content": spec.system_prompt}], False))
    log.append(_message(tokenizer, "user", [{"role": "user", "content": question}], True, begins=not log))
    return log


def math_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerLike,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Rows {"problem", "expected_answer"}: system and user message apart."""
    problem = datum_dict["problem"]
    if task_data_spec.prompt:
        problem = task_data_spec.prompt.format(problem)
    return _datum(
        datum_dict,
        _separate_messages(problem, task_data_spec, tokenizer),
        {"ground_truth": str(datum_dict["expected_answer"])},
        max_seq_length,
        idx,
    )


def math_hf_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerLike,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Rows {"messages": [question, answer]}: system prompt and question as one user entry."""
    messages = datum_dict["messages"]
    problem = messages[0]["content"]
    if task_data_spec.prompt:
        problem = task_data_spec.prompt.format(problem)
    chat = [{"role": "user", "content": problem}]
    if task_data_spec.system_prompt:
        chat.insert(0, {"role": "system", "content": task_data_spec.system_prompt})
    return _datum(datum_dict, [_message(tokenizer, "user", chat, True)], _env_info(datum_dict), max_seq_length, idx)


def _env_info(datum_dict: dict[str, Any]) -> dict[str, Any]:
    """What the environment gets: the answer, and whatever else the row carries for it."""
    return {"ground_truth": datum_dict["messages"][1]["content"], **(datum_dict.get("extra_env_info") or {})}


def raw_completion_data_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerLike,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Rows {"messages": [question, answer]} as plain text to be continued: no chat template; a BOS token where the tokenizer adds one.

    The prompt file wraps the question and the system prompt goes before it, both literally. For base models and for
    few-shot tasks, which end their line with the row's "stop_strings".
    """
    text = datum_dict["messages"][0]["content"]
    if task_data_spec.prompt:
        text = task_data_spec.prompt.format(text)
    if task_data_spec.system_prompt:
        text = task_data_spec.system_prompt + text
    log = [{"role": "user", "content": text, "token_ids": torch.tensor(prompt_ids(tokenizer, text), dtype=torch.int64)}]
    return _datum(datum_dict, log, _env_info(datum_dict), max_seq_length, idx)


def multichoice_qa_processor(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: TokenizerLike,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Rows {"question", "options": {letter: text}, "answer"} (and "subject"): options are listed after the question."""
    question = datum_dict["question"]
    if task_data_spec.prompt:
        options = "\n".join(f"{letter}) {text}" for letter, text in datum_dict["options"].items() if text is not None)
        question = f"{task_data_spec.prompt}\n\nQuestion: {question}\nOptions:\n{options}"
    extra: dict[str, Any] = {"ground_truth": str(datum_dict["answer"])}
    if "subject" in datum_dict:
        extra["subject"] = datum_dict["subject"]
    return _datum(datum_dict, _separate_messages(question, task_data_spec, tokenizer), extra, max_seq_length, idx)


PROCESSOR_REGISTRY: dict[str, TaskDataProcessFnCallable] = {
    "default": math_hf_data_processor,
    "math_data_processor": math_data_processor,
    "math_hf_data_processor": math_hf_data_processor,
    "multichoice_qa_processor": multichoice_qa_processor,
    "raw_completion_data_processor": raw_completion_data_processor,
}


def register_processor(processor_name: str, processor_function: TaskDataProcessFnCallable) -> None:
    """Makes a processor known to configurations by name. ValueError if the name is taken."""
    if processor_name in PROCESSOR_REGISTRY:
        raise ValueError(f"Processor name {processor_name} already registered")
    PROCESSOR_REGISTRY[processor_name] = processor_function
