"""Conversations as token ids, and tool calls in what a model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.prompt_rendering import render_prompt

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.bodies import ChatMessage

MARK = "<tool_call>"
"""How a call begins; a chat template that writes it teaches its model this form."""
THINK, END_OF_THINKING = "<think>", "</think>"
MARKS = (MARK, "</tool_call>", THINK, END_OF_THINKING)
"""The texts by which an answer's parts are told apart; some tokenizers have them as special tokens."""
_PART = re.compile(rf"{THINK}|{MARK}\s*")
_END = re.compile(r"\s*</tool_call>")


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedToolCalls:
    """What a model has said: text, and calls."""

    text: str
    calls: list[Call] = field(default_factory=list)


def find_calls(text: str, request_id: str, thinks: bool = False) -> ParsedToolCalls:
    """Finds the calls in the answer's part of `text`; returns them, and the text without them.

    `thinks`: whether the prompt has opened the thinking already. Thinking without an end goes to the end of the text. A call
    that is no JSON object with a name stays text.
    """
    calls: list[Call] = []
    kept, copied = [], 0
    at = _end_of_thinking(text, 0) if thinks else 0
    while (part := _PART.search(text, at)) is not None:
        if part[0] == THINK:
            at = _end_of_thinking(text, part.end())
            continue
        found = _call(text, part.end(), f"call_{request_id}_{len(calls)}")
        at = part.end()
        if found is not None:
            call, at = found
            calls.append(call)
            kept.append(text[copied : part.start()])
            copied = at
    return ParsedToolCalls("".join([*kept, text[copied:]]).strip() if calls else text, calls)


def _end_of_thinking(text: str, begin: int) -> int:
    end = text.find(END_OF_THINKING, begin)
    return len(text) if end < 0 else end + len(END_OF_THINKING)


def _call(text: str, begin: int, call_id: str) -> tuple[Call, int] | None:
    """Reads the call whose JSON begins at `begin`; returns it and where it ends."""
    try:
        content, at = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    end = _END.match(text, at)
    if end is None or not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Call(call_id, content["name"], written), end.end()


_PLACE = "9001place1009"  # digits and letters, which templates let through
_ENOUGH_IDS = 32  # for the mark, in whatever pieces, and blank lines behind it
Turn = tuple[str, str, tuple[tuple[str, str], ...], str]
"""Role, content without blanks around it, calls and reasoning of a message: what tells two messages apart."""
Tools = list[Mapping[str, object]]


@dataclass(frozen=True)
class AssistantTurn:
    """A conversation that the model has answered.

    Attributes:
        turns: its messages, the answer the last of them.
        ids: prompt and answer.
        stopped: whether the answer's last token is the one that ended it.
        tools: that the prompt names.
    """

    turns: tuple[Turn, ...]
    ids: list[int]
    stopped: bool
    tools: Tools | None = None


def turn_of(role: str, text: str, calls: Sequence[tuple[str, str]] = (), reasoning: str = "") -> Turn:
    """A message as it is compared."""
    return role, text.strip(), tuple(calls), reasoning


def turns_of(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    """The messages of a request as they are compared."""
    return tuple(
        turn_of(
            m.role,
            m.text,
            [(c.function.name, c.function.arguments) for c in m.tool_calls or ()],
            m.reasoning_content or "",
        )
        for m in messages
    )


def takes_tools(tokenizer: TokenizerType) -> bool:
    """Whether the chat template writes tools in the form whose calls are understood here."""
    return MARK in str(getattr(tokenizer, "chat_template", None))


def opens_thinking(tokenizer: TokenizerType, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends where the thinking has begun: templates of reasoning models write `<think>` themselves."""
    end = tokenizer.decode(list(prompt[-_ENOUGH_IDS:]), skip_special_tokens=False)
    return end.rstrip().endswith(THINK)


def chat_prompt(
    tokenizer: TokenizerType, messages: Sequence[ChatMessage], tools: Tools | None, said: Sequence[AssistantTurn]
) -> list[int]:
    """The prompt of a conversation.

    Where it goes on from one of `said` with the same tools, that one's ids and then the ids of what is new; else the ids of the template's text.
    ChatTemplateError where the template takes no such conversation.
    """
    plain = [_plain(message) for message in messages]
    turns = turns_of(messages)
    known = [
        s
        for s in said
        if len(s.turns) < len(turns) and turns[: len(s.turns)] == s.turns and (s.tools or None) == (tools or None)
    ]
    if known:
        last = max(known, key=lambda s: len(s.turns))
        new = _text_behind(tokenizer, plain, len(last.turns) - 1, tools)
        if new is not None:
            return last.ids + _ids_of(tokenizer, new, last)
    return prompt_ids(tokenizer, render_prompt(tokenizer, plain, tools=tools), plain)


def _text_behind(
    tokenizer: TokenizerType, messages: list[dict[str, object]], answer: int, tools: Tools | None
) -> str | None:
    """What the template writes behind the content of message `answer`; None where that cannot be told."""
    marked = [*messages]
    marked[answer] = {"role": "assistant", "content": _PLACE}
    text = render_prompt(tokenizer, marked, tools=tools)
    return text.rpartition(_PLACE)[2] if text.count(_PLACE) == 1 else None


def _ids_of(tokenizer: TokenizerType, text: str, last: AssistantTurn) -> list[int]:
    if last.stopped:  # its end token is there already
        text = text.removeprefix(tokenizer.decode(last.ids[-1:], skip_special_tokens=False))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [int(i) for i in ids]


def _plain(message: ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.function.name, "arguments": _parsed(c.function.arguments)},
            }
            for c in message.tool_calls
        ]
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _parsed(arguments: str) -> object:
    """Templates write arguments as JSON themselves, so they take the value."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
