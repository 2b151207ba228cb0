"""Tool calls in what a model writes, in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from dataclasses import dataclass, field

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MARK = "<tool_call>"
"""How a call begins; a chat template that writes it teaches its model this form."""


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Spoken:
    """What a model has said: text, and calls."""

    text: str
    calls: list[Call] = field(default_factory=list)


def find_calls(text: str, request_id: str) -> Spoken:
    """The calls in `text`, and the text without them. A call that is no JSON object with a name stays text."""
    calls: list[Call] = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match[1], f"call_{request_id}_{len(calls)}")
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(taken, text)
    return Spoken(rest.strip() if calls else text, calls)


def _call(text: str, call_id: str) -> Call | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    return Call(call_id, content["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
