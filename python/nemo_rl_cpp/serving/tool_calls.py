"""Finds tool calls in what a model writes, in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Thinking and answer are told apart first: a call that is weighed between `<think>` and `</think>` is no call.
"""

import json
import re
from dataclasses import dataclass, field

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
