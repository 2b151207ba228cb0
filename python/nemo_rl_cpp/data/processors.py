"""Processors, which convert a row of a data set to a tokenized prompt with data for its environment.

A processor is called with (datum_dict, task_data_spec, tokenizer, max_seq_length, idx) and returns a DatumSpec.
Configurations select it by name; `register_processor` adds one."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import NamedTuple

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.chat_template import ChatTemplateError, render_prompt, system_part
from nemo_rl_cpp.data.conversation import (
    ChatMessage,
    conversation_of,
    is_parts,
    joined_text,
    split_conversation,
    text_of,
    tools_of,
)
from nemo_rl_cpp.data.interfaces import DatumSpec, Row, TaskDataProcessFnCallable, TaskDataSpec, TokenizerType
from nemo_rl_cpp.errors import say_once


class Entry(NamedTuple):
    """One message of a prompt: its role, its part of the rendered text, and the token ids of this part."""

    role: str
    content: str
    ids: list[int]


class Prompt(NamedTuple):
    """A processed row: the messages of the prompt, and the data for its environment."""

    entries: list[Entry]
    extra_env_info: dict[str, object]

    @property
    def length(self) -> int:
        return sum(len(entry.ids) for entry in self.entries)


PromptMaker = Callable[[Row, TaskDataSpec, TokenizerType], Prompt]


def _datum(
    make: PromptMaker, row: Row, spec: TaskDataSpec, tokenizer: TokenizerType, limit: int | None, idx: int
) -> DatumSpec:
    """Return the DatumSpec of a row. A prompt of `limit` tokens or more leaves no room for a response, so each message
    is cut to a few tokens, and `loss_multiplier` is 0; `length` counts all tokens of the whole prompt."""
    import torch

    try:
        prompt = make(row, spec, tokenizer)
    except ValueError as error:
        kind = ChatTemplateError if isinstance(error, ChatTemplateError) else ValueError
        raise kind(f"row {idx + 1} of the data: {error}") from error
    keep, loss_multiplier = None, 1.0
    if limit is not None and prompt.length >= limit:
        keep, loss_multiplier = min(4, limit // len(prompt.entries)), 0.0
    message_log = [
        {"role": role, "content": content, "token_ids": torch.tensor(ids[:keep], dtype=torch.int64)}
        for role, content, ids in prompt.entries
    ]
    return {
        "message_log": message_log, "length": prompt.length, "extra_env_info": prompt.extra_env_info,
        "loss_multiplier": loss_multiplier, "idx": idx,
        **{key: row[key] for key in ("task_name", "stop_strings") if row.get(key) is not None},
    }  # fmt: skip


PROCESSOR_REGISTRY: dict[str, TaskDataProcessFnCallable] = {}  # maps the names that configurations use to processors
PROMPT_MAKERS: dict[Callable[..., DatumSpec], PromptMaker] = {}
"""Maps each processor of this file to its prompt maker, which does not need torch."""


def _processor(make: PromptMaker) -> TaskDataProcessFnCallable:
    """Return a processor, a function from a row to a DatumSpec, that takes the prompt of each row from `make`. Register
    it under the name of `make`."""

    @wraps(make)
    def process(
        datum_dict: Row, task_data_spec: TaskDataSpec, tokenizer: TokenizerType, max_seq_length: int | None, idx: int
    ) -> DatumSpec:
        return _datum(make, datum_dict, task_data_spec, tokenizer, max_seq_length, idx)

    del process.__wrapped__  # it has a different signature
    PROCESSOR_REGISTRY[make.__name__], PROMPT_MAKERS[process] = process, make
    return process


def _column(row: Row, key: str, processor: str) -> object:
    if key not in row:
        raise ValueError(f"{processor} reads the key {key!r}, but the row has {list(row)}")
    return row[key]


def _question(value: object, key: str) -> str:
    value = text_of(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key!r} must be a text that is not empty, but is {value!r}")
    return value


_TOKEN = re.compile(r"\{\{|\}\}|\{0?\}|[{}]")
# Text before a `{}` that is its argument: a LaTeX command with its earlier arguments, or a sub- or superscript.
_LATEX = re.compile(r"(\\[A-Za-z]+\*?(\[[^\]\n]*\])?(\{[^{}\n]*\}|\{\{[^{}\n]*\}\})*|[\^_])$")


def fill_prompt(prompt: str, question: str) -> str:
    """Return `prompt` with the question in place of `{}`. Raise ValueError unless there is exactly one `{}`."""
    before, after = split_prompt(prompt)
    return before + question + after


@lru_cache(maxsize=64)
def split_prompt(prompt: str) -> tuple[str, str]:
    """Return the text before and after the placeholder `{}` of a prompt file. If all other braces are doubled, the text
    is parsed as by `str.format`; otherwise braces are literal, and the `{}` after a LaTeX command is no placeholder.
    Raise ValueError, which quotes the line, unless there is exactly one placeholder."""
    tokens = [(found.start(), found[0]) for found in _TOKEN.finditer(prompt)]
    places = [(start, token) for start, token in tokens if token in ("{}", "{0}")]
    formatted = all(token in ("{{", "}}", "{}", "{0}") for _, token in tokens) and len(places) <= 1
    if not formatted:
        if "{{}}" in prompt:
            line = _line(prompt, prompt.index("{{}}"))
            text = "has doubled braces {{}}, but other braces of the file are single"
            raise ValueError(f"line {line} {text}: double all braces that are text, or none")
        places = [(found.start(), "{}") for found in re.finditer(r"\{\}", prompt)]
    alone = [(start, token) for start, token in places if not _LATEX.search(prompt[:start])]
    if len(alone) != 1:
        raise ValueError(_wrong_places(prompt, [start for start, _ in places], [start for start, _ in alone]))
    start, token = alone[0]
    parts = prompt[:start], prompt[start + len(token) :]
    return tuple(part.replace("{{", "{").replace("}}", "}") for part in parts) if formatted else parts


def _line(prompt: str, at: int) -> int:
    return prompt.count("\n", 0, at) + 1


def _wrong_places(prompt: str, places: list[int], alone: list[int]) -> str:
    if alone:
        lines = " and ".join(str(_line(prompt, at)) for at in alone)
        return f"the place {{}} for the question stands {len(alone)} times (lines {lines}), expected once"
    if places:
        found = _LATEX.search(prompt[: places[0]])
        return (
            f"line {_line(prompt, places[0])}: the only {{}} is the argument of {found[0]}, so the question has no place: write "
            f"{found[0]}{{{{}}}} for the LaTeX and {{}} where the question goes"
        )
    named = re.search(r"\{[A-Za-z_]+\}", prompt)
    instead = f" instead of {named[0]} (line {_line(prompt, named.start())})" if named else ""
    return f"there is no place for the question: write {{}} where it goes{instead}"


def system_message(spec: TaskDataSpec) -> list[ChatMessage]:
    """Return the system message in a list, [] if there is none, without the newlines at its end that editors add."""
    text = (spec.system_prompt or "").rstrip("\r\n")
    return [{"role": "system", "content": text}] if text else []


def _with_system(messages: list[ChatMessage], spec: TaskDataSpec) -> list[ChatMessage]:
    """Return `messages` after the task's system message, if it has one. Raise ValueError if they contain another."""
    system = system_message(spec)
    if system and any(message["role"] in ("system", "developer") for message in messages):
        remedy = "set system_prompt_file to null, or take the rows' system messages out"
        raise ValueError(f"the row has a system message of its own and system_prompt_file is set: {remedy}")
    return [*system, *messages]


def _separate_messages(question: str, spec: TaskDataSpec, tokenizer: TokenizerType) -> list[Entry]:
    """Return the system entry (if any) and the user entry of a prompt, split where the rendered system message ends."""
    messages: list[ChatMessage] = [*system_message(spec), {"role": "user", "content": question}]
    text = render_prompt(tokenizer, messages)
    ids = prompt_ids(tokenizer, text, messages)
    at = system_part(tokenizer, messages, text) if len(messages) > 1 else 0
    if at == 0:
        return [Entry("user", text, ids)]
    # The ids are those of the whole text. A token that spans both messages belongs to the user's.
    before = prompt_ids(tokenizer, text[:at], messages[:1])
    count = next((i for i, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
    return [Entry("system", text[:at], ids[:count]), Entry("user", text[at:], ids[count:])]


@_processor
def math_data_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"problem", "expected_answer"} to a prompt with separate system and user messages."""
    problem = _question(_column(row, "problem", "math_data_processor"), "problem")
    truth = _column(row, "expected_answer", "math_data_processor")
    if spec.prompt:
        problem = fill_prompt(spec.prompt, problem)
    return Prompt(_separate_messages(problem, spec, tokenizer), {"ground_truth": text_of(truth)})


def _asked(row: Row, spec: TaskDataSpec, processor: str) -> tuple[list[ChatMessage], dict[str, object]]:
    """Return (messages of the prompt, data for the environment) of a row. If the task has a prompt file, its text, with
    the question in place of `{}`, replaces the last user message."""
    messages, truth = split_conversation(_column(row, "messages", processor))
    if spec.prompt:
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[last] = {**messages[last], "content": fill_prompt(spec.prompt, str(messages[last]["content"]))}
    info = row.get("extra_env_info") or {}
    if not isinstance(info, Mapping):
        raise ValueError(f"'extra_env_info' is {in_a_line(info)}: expected a mapping")
    return messages, {"ground_truth": truth, **info}


@_processor
def math_hf_data_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"messages"} to one user entry with the system prompt and the conversation up to the last question,
    rendered with the row's "tools". A last message of the assistant is the ground truth."""
    messages, info = _asked(row, spec, "math_hf_data_processor")
    messages = _with_system(messages, spec)
    text = render_prompt(tokenizer, messages, tools=tools_of(row))
    return Prompt([Entry("user", text, prompt_ids(tokenizer, text, messages))], info)


@_processor
def raw_completion_data_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"messages": [question, answer]} to plain text that the model continues: the system prompt,
    followed by the question, which the prompt file may surround with text. For base models and few-shot tasks;
    responses end at the row's "stop_strings"."""
    messages, info = _asked(row, spec, "raw_completion_data_processor")
    if len(messages) > 1:
        roles = ", ".join(str(message["role"]) for message in messages)
        text = f"raw_completion_data_processor continues one text, but the row has the roles {roles}"
        raise ValueError(f"{text}: set processor to math_hf_data_processor, which uses the chat template")
    text = f"{spec.system_prompt or ''}{messages[0]['content']}"
    return Prompt([Entry("user", text, prompt_ids(tokenizer, text))], info)


@_processor
def agent_data_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"messages"} to a prompt for agents, which call the policy themselves. The environment gets
    `messages`, with the system prompt; the prompt's own text, the contents of these messages joined by newlines, is not
    used."""
    messages, info = _asked(row, spec, "agent_data_processor")
    messages = _with_system(messages, spec)
    text = "\n".join(str(message["content"]) for message in messages)
    return Prompt([Entry("user", text, prompt_ids(tokenizer, text))], {**info, "messages": messages})


@_processor
def multichoice_qa_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"question", "options": {letter: text}, "answer"}, optionally with "subject", to a prompt: if
    there is a prompt file, its text with the question and the options; otherwise the question alone."""
    name = "multichoice_qa_processor"
    question = _question(_column(row, "question", name), "question")
    if spec.prompt:
        options = _column(row, "options", name)
        if not isinstance(options, Mapping) or not any(text is not None for text in options.values()):
            raise ValueError(f"'options' must be a mapping from letters to texts, but is {options!r}")
        listed = "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)
        question = f"{spec.prompt}\n\nQuestion: {question}\nOptions:\n{listed}"
    extra: dict[str, object] = {"ground_truth": text_of(_column(row, "answer", name))}
    if "subject" in row:
        extra["subject"] = row["subject"]
    return Prompt(_separate_messages(question, spec, tokenizer), extra)


_NO_ANSWER = "the row has no answer to train: 'messages' must end with a message of the assistant, a text or tool calls"


@_processor
def sft_processor(row: Row, spec: TaskDataSpec, tokenizer: TokenizerType) -> Prompt:
    """Convert a row {"messages"} to a conversation on whose assistant messages the model is trained. Each assistant
    message gives two entries of the prompt: a user entry (not trained) with the conversation since the previous
    assistant message, and an assistant entry (trained) that includes the template's end of the turn. The last entry
    ends with the end token. If the template changes answers once others follow, only the last answer is trained."""
    messages, info = _asked(row, spec, "sft_processor")
    last = conversation_of(row["messages"], "messages")[-1]  # with its reasoning and tool calls
    content = last.get("content")
    content = joined_text(content) if is_parts(content) else content
    has_text = isinstance(content, str) and content != ""
    if last["role"] != "assistant" or not (has_text or (last.get("tool_calls") and content in ("", None))):
        raise ValueError(_NO_ANSWER)
    messages = [*_with_system(messages, spec), {**last, "content": content}]
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [_turn(tokenizer, messages[:end], tools_of(row)) for end in ends]
    befores = ["", *(turn and turn[1] for turn in turns)]
    if any(turn is None or not turn[0].startswith(before) for turn, before in zip(turns, befores)):
        if turns[-1] is None:
            raise ValueError("the chat template changes the messages before the last answer, so it cannot be trained")
        text = "the chat template changes answers that others follow (Qwen3's omits their reasoning), so only the last answer"
        say_once("warning", f"{text} of such rows is trained; to train the others, add rows that end with them")
        ends, turns = ends[-1:], turns[-1:]
    entries: list[Entry] = []
    done = ""
    for end, (asked, said) in zip(ends, turns):
        prompt, answered = asked[len(done) :], said[len(asked) :]
        if end == len(messages):
            answered = answered.rstrip("\n")
            if not answered and not has_text:  # the template writes no tool calls
                raise ValueError(_NO_ANSWER)
            stop = tokenizer.eos_token or ""
            answered += "" if answered.endswith(stop) else stop
        before = messages[: end - 1]
        ids = _piece(tokenizer, entries[-1].content, prompt) if entries else prompt_ids(tokenizer, prompt, before)
        entries += [Entry("user", prompt, ids), Entry("assistant", answered, _piece(tokenizer, prompt, answered))]
        done = said
    return Prompt(entries, info)


def _turn(
    tokenizer: TokenizerType, messages: list[ChatMessage], tools: list[dict[str, object]] | None
) -> tuple[str, str] | None:
    """Return a conversation as text, without and with its last message, an answer. Return None if the template writes
    the other messages differently once the answer follows."""
    said = render_prompt(tokenizer, messages, False, tools)
    for begins in (True, False):  # a template may begin answers with reasoning, which this answer lacks
        asked = render_prompt(tokenizer, messages[:-1], begins, tools)
        if said.startswith(asked):
            return asked, said
    return None


def _piece(tokenizer: TokenizerType, before: str, text: str) -> list[int]:
    """Return the token ids of `text` behind `before` in a conversation: no special tokens are added, and no space, which
    SentencePiece tokenizers put before a text of its own. If a token spans both, `text` is tokenized alone."""
    first, whole, alone = tokenizer([before, before + text, text], add_special_tokens=False)["input_ids"]
    return whole[len(first) :] if whole[: len(first)] == first else alone


PROCESSOR_REGISTRY |= {"default": math_hf_data_processor, "nemo_gym_data_processor": agent_data_processor}
FILLS_A_PLACE = PROMPT_MAKERS.keys() - {multichoice_qa_processor}
"""The processors that insert the question at the placeholder `{}` of the prompt file."""


def register_processor(processor_name: str, processor_function: TaskDataProcessFnCallable) -> None:
    """Register a processor. Raise ValueError if the name is taken."""
    if processor_name in PROCESSOR_REGISTRY:
        raise ValueError(f"Processor name {processor_name} already registered")
    PROCESSOR_REGISTRY[processor_name] = processor_function
