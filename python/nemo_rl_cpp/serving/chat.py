"""Convert conversations to token ids, and find tool calls in the text of a response."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.chat_template import render_prompt
from nemo_rl_cpp.data.interfaces import TokenizerType

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.bodies import ChatMessage

MARK = "<tool_call>"
THINK, END_OF_THINKING = "<think>", "</think>"
MARKS = (MARK, "</tool_call>", THINK, END_OF_THINKING)
"""The tags that separate the parts of a response; in some tokenizers they are special tokens."""
_PART = re.compile(rf"{THINK}|{MARK}\s*")
_END = re.compile(r"\s*</tool_call>")
_TAGGED = (  # how a call with tags instead of JSON begins, each of its arguments, and its end
    (  # Qwen3.5 and Nemotron 3
        re.compile(r"<function=([^>\n]+)>\s*"),
        re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
        re.compile(r"</function>\s*</tool_call>"),
    ),
    (  # GLM-4.5 and later
        re.compile(r"([\w.-]+)\s*(?=<arg_key>|</tool_call>)"),
        re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
        re.compile(r"</tool_call>"),
    ),
)


@dataclass(frozen=True)
class Call:
    """A tool call in a response; `arguments` is a JSON string."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedToolCalls:
    """The tool calls in a response, and its text without them."""

    text: str
    calls: list[Call] = field(default_factory=list)


def find_calls(text: str, request_id: str, thinks: bool = False, tools: Tools | None = None) -> ParsedToolCalls:
    """Extract the tool calls from the text of a response, except those in the reasoning block. If `thinks`, the text
    begins inside this block. `tools`, the request's, give the types of arguments that are written without JSON.

    A call is a JSON object with a name, or a name and arguments in tags, as Qwen3.5, Nemotron 3 and GLM write it.
    Anything else stays in the text."""
    calls: list[Call] = []
    kept, copied = [], 0
    at = _end_of_thinking(text, 0) if thinks else 0
    while (part := _PART.search(text, at)) is not None:
        if part[0] == THINK:
            at = _end_of_thinking(text, part.end())
            continue
        found = _call(text, part.end()) or _tagged_call(text, part.end(), tools or ())
        at = part.end()
        if found is not None:
            name, arguments, at = found
            calls.append(Call(f"call_{request_id}_{len(calls)}", name, arguments))
            kept.append(text[copied : part.start()])
            copied = at
    return ParsedToolCalls("".join([*kept, text[copied:]]).strip() if calls else text, calls)


def _end_of_thinking(text: str, begin: int) -> int:
    end = text.find(END_OF_THINKING, begin)
    return len(text) if end < 0 else end + len(END_OF_THINKING)


def _call(text: str, begin: int) -> tuple[str, str, int] | None:
    """Parse the tool call whose JSON starts at `begin`. Return (name, arguments as JSON, index of the call's end), or None
    if it is invalid."""
    try:
        content, at = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    end = _END.match(text, at)
    if end is None or not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return content["name"], written, end.end()


def _tagged_call(text: str, begin: int, tools: Tools) -> tuple[str, str, int] | None:
    """Parse the tool call with tags that starts at `begin`. Return what `_call` returns."""
    for opening, argument, closing in _TAGGED:
        if (function := opening.match(text, begin)) is None:
            continue
        schemas = [tool.get("function") or {} for tool in tools]
        own = next((schema for schema in schemas if schema.get("name") == function[1]), {})
        properties = (own.get("parameters") or {}).get("properties") or {}
        arguments, at = {}, function.end()
        while (found := argument.match(text, at)) is not None:
            name, value = found.groups()
            arguments[name] = _typed(value, properties.get(name) or {})
            at = found.end()
        end = closing.match(text, at)
        return None if end is None else (function[1], json.dumps(arguments), end.end())
    return None


def _typed(value: str, schema: Mapping[str, object]) -> object:
    """Return an argument written without JSON, parsed unless its JSON schema allows a string or gives no type."""
    types = json.dumps([schema.get("type"), schema.get("anyOf")])
    if types == "[null, null]" or '"string"' in types:
        return value
    return _parsed({"True": "true", "False": "false", "None": "null"}.get(value, value))


_PLACE = "9001place1009"  # digits and letters, which templates do not change
ENOUGH_IDS = 32  # the last ids of a prompt that contain `<think>` and blank lines after it
Turn = tuple[str, str, tuple[tuple[str, str], ...], str]
"""A message in the form for comparison: role, content without surrounding spaces, tool calls, reasoning."""
Tools = list[Mapping[str, object]]


@dataclass(frozen=True)
class AssistantTurn:
    """A conversation up to a response of the model, with the token ids of prompt and response."""

    turns: tuple[Turn, ...]  # the messages of the conversation, with the response last
    ids: list[int]  # the token ids of prompt and response
    stopped: bool  # whether the last token is a stop token
    options: Mapping[str, object] = field(default_factory=dict)  # `tools` and further variables of the chat template


def turn_of(role: str, text: str, calls: Sequence[tuple[str, str]] = (), reasoning: str = "") -> Turn:
    return role, text.strip(), tuple(calls), reasoning


def turns_of(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    """Return the messages of a request as tuples that can be compared for equality."""
    calls = [[(c.function.name, c.function.arguments) for c in m.tool_calls or ()] for m in messages]
    return tuple(turn_of(m.role, m.text, its, m.reasoning_content or "") for m, its in zip(messages, calls))


def chat_prompt(
    tokenizer: TokenizerType, messages: Sequence[ChatMessage], options: Mapping[str, object], earlier: Sequence[AssistantTurn]
) -> list[int]:  # fmt: skip
    """Return the token ids of a conversation. If it continues one of `earlier` with the same `options` (tools and other
    variables of the chat template), reuse the longest one's ids, and append those of the new text. Raise
    ChatTemplateError if the template rejects the conversation."""
    plain = [_plain(message) for message in messages]
    turns = turns_of(messages)
    alike = [each for each in earlier if each.options == options]
    known = [each for each in alike if len(each.turns) < len(turns) and turns[: len(each.turns)] == each.turns]
    if known:
        last = max(known, key=lambda each: len(each.turns))
        new = _text_behind(tokenizer, plain, len(last.turns) - 1, options)
        if new is not None:
            if last.stopped:  # the end token is already included
                new = new.removeprefix(tokenizer.decode(last.ids[-1:], skip_special_tokens=False))
            return last.ids + [int(i) for i in tokenizer(new, add_special_tokens=False)["input_ids"]]
    return prompt_ids(tokenizer, render_prompt(tokenizer, plain, **options), plain)


def _text_behind(
    tokenizer: TokenizerType, messages: list[dict[str, object]], answer: int, options: Mapping[str, object]
) -> str | None:
    """Return the text that the chat template writes after the assistant message with the index `answer`. Return None if
    the template changes the content of that message."""
    marked = [*messages]
    marked[answer] = {"role": "assistant", "content": _PLACE}
    text = render_prompt(tokenizer, marked, **options)
    return text.rpartition(_PLACE)[2] if text.count(_PLACE) == 1 else None


def _plain(message: ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        made = [(c.id, c.function) for c in message.tool_calls]
        calls = [(i, {"name": f.name, "arguments": _parsed(f.arguments)}) for i, f in made]
        plain["tool_calls"] = [{"id": key, "type": "function", "function": function} for key, function in calls]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _parsed(arguments: str) -> object:
    """Parse a tool call's arguments from JSON, since chat templates serialize them. Return invalid JSON unchanged."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
