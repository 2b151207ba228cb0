"""Prompts of rows: the text of a prompt file with the question put in, and its messages through the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.chat_template import ChatTemplateError
from nemo_rl_cpp.data.interfaces import TokenizerType

if TYPE_CHECKING:
    Messages = Sequence[Mapping[str, object]]
    Tools = Sequence[Mapping[str, object]] | None

_TOKEN = re.compile(r"\{\{|\}\}|\{0?\}|[{}]")
# What a `{}` directly after it belongs to: a LaTeX command with its arguments so far, or a sub- or superscript.
_LATEX = re.compile(r"(\\[A-Za-z]+\*?(\[[^\]\n]*\])?(\{[^{}\n]*\}|\{\{[^{}\n]*\}\})*|[\^_])$")


def fill_prompt(prompt: str, question: str) -> str:
    """`prompt` with the question at its place. ValueError when it has not exactly one place."""
    before, after = split_prompt(prompt)
    return before + question + after


@lru_cache(maxsize=64)
def split_prompt(prompt: str) -> tuple[str, str]:
    """What stands before and after the place, with literal braces as they are meant. ValueError names the line."""
    tokens = [(found.start(), found[0]) for found in _TOKEN.finditer(prompt)]
    formatted = [start for start, token in tokens if token in ("{}", "{0}")]
    if all(token in ("{{", "}}", "{}", "{0}") for _, token in tokens) and len(formatted) <= 1:
        if not formatted:
            raise ValueError(_no_place(prompt))
        _refuse_latex(prompt, formatted)
        before, after = prompt[: formatted[0]], prompt[formatted[0] :].partition("}")[2]
        return _single(before), _single(after)
    places = [found.start() for found in re.finditer(r"\{\}", prompt)]
    if any(prompt[at - 1 : at + 3] == "{{}}" for at in places if at):
        line = _line(prompt, prompt.index("{{}}"))
        raise ValueError(
            f"line {line} has doubled braces {{{{}}}}, but other braces of the file are single: double all braces that "
            "are text, or none"
        )
    alone = [at for at in places if not _LATEX.search(prompt[:at])]
    if len(alone) > 1:
        lines = " and ".join(str(_line(prompt, at)) for at in alone)
        raise ValueError(f"the place {{}} for the question stands {len(alone)} times (lines {lines}), expected once")
    if not alone:
        _refuse_latex(prompt, places)
        raise ValueError(_no_place(prompt))
    return prompt[: alone[0]], prompt[alone[0] + 2 :]


def _single(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")


def _line(prompt: str, at: int) -> int:
    return prompt.count("\n", 0, at) + 1


def _no_place(prompt: str) -> str:
    named = re.search(r"\{[A-Za-z_]+\}", prompt)
    instead = f" instead of {named[0]} (line {_line(prompt, named.start())})" if named else ""
    return f"there is no place for the question: write {{}} where it goes{instead}"


def _refuse_latex(prompt: str, places: list[int]) -> None:
    for at in places:
        found = _LATEX.search(prompt[:at])
        if found:
            raise ValueError(
                f"line {_line(prompt, at)}: the only {{}} is the argument of {found[0]}, so the question has no place: write "
                f"{found[0]}{{{{}}}} for the LaTeX and {{}} where the question goes"
            )


_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OTHERS = str.maketrans(_SIGNS, "1234567890bcdefghijklmnopqrstuvwxyzaBCDEFGHIJKLMNOPQRSTUVWXYZA")
_KEPT: set[tuple[object, ...]] = set()  # (template, roles, ...) whose messages are known to reach the text


def render_prompt(
    tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool = True, tools: Tools = None
) -> str:
    """The chat template's text of a conversation. ChatTemplateError when a message's content is not in it."""
    text = _apply(tokenizer, messages, add_generation_prompt, tools)
    missing = [i for i, message in enumerate(messages) if _content(message) not in text]
    shape = (
        type(tokenizer), str(getattr(tokenizer, "chat_template", None)), str(getattr(tokenizer, "chat_template_kwargs", None)),
        tuple((message.get("role"), bool(_content(message))) for message in messages), bool(tools),
    )  # fmt: skip
    if missing or shape not in _KEPT:
        lost = _lost(tokenizer, messages, add_generation_prompt, tools, missing) or [
            i for i in missing if _is_all_the_same(tokenizer, messages, i, add_generation_prompt, tools, text)
        ]
        if lost:
            raise ChatTemplateError(_leaves_out(messages, lost[0], getattr(tokenizer, "section", "policy.tokenizer")))
        if len(_KEPT) > 256:
            _KEPT.clear()
        _KEPT.add(shape)
    return text


def _lost(
    tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool, tools: Tools, missing: list[int]
) -> list[int]:
    """Numbers of the messages that the template leaves out; `missing` are those whose content is not in the text as it is.

    A template may change a content (escape it, drop its reasoning), and a short content may be in the text by chance: numbers
    in the contents' places show what reaches the text.
    """
    marked = [{**m, "content": _mark(i)} if _content(m) else m for i, m in enumerate(messages)]
    try:
        probe = _apply(tokenizer, marked, add_generation_prompt, tools)
    except ValueError:  # a template that looks into contents
        return missing
    return [i for i, message in enumerate(messages) if _content(message) and _mark(i) not in probe]


def _is_all_the_same(
    tokenizer: TokenizerType, messages: Messages, i: int, add_generation_prompt: bool, tools: Tools, text: str
) -> bool:
    """Whether a message of other letters and digits in the same places gives the same `text`: a template may drop contents
    by their length or marks."""
    content = str(messages[i]["content"]).translate(_OTHERS)
    others = [{**message, "content": content} if k == i else message for k, message in enumerate(messages)]
    try:
        return content != messages[i]["content"] and _apply(tokenizer, others, add_generation_prompt, tools) == text
    except ValueError:  # a template that looks into contents
        return False


def _leaves_out(messages: Messages, i: int, section: str) -> str:
    role = messages[i]["role"]
    begin = f"the chat template leaves out message {i} ({role}, {_content(messages[i])[:60]!r}): the model would never see it; "
    if not section:
        return f"{begin}leave it out, or put its text into the user's message"
    return f"{begin}set {section}.chat_template to a template for these roles" + (
        ", or put the text into prompt_file" if role == "system" else ""
    )


def _mark(i: int) -> str:
    return f"9001{i}1009"  # digits, which no filter for letters changes


def _apply(tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool, tools: Tools) -> str:
    options = {"tools": tools} if tools else {}
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, add_special_tokens=False, **options
        )
    except ValueError:
        raise
    except Exception as error:  # transformers' tokenizers let a template's own errors through
        raise ChatTemplateError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def system_part(tokenizer: TokenizerType, messages: Messages, text: str) -> int:
    """How many characters at the beginning of `text`, the prompt of `messages`, belong to its first (system) message.

    Up to where the text of that message alone goes on unchanged; or, for templates that write no system message alone or
    put it into the user's turn, to the end of its content. 0 where it cannot be told.
    """
    try:
        alone = _apply(tokenizer, messages[:1], False, None)
    except ValueError:  # many templates refuse a system message alone
        alone = ""
    content = _content(messages[0])
    if content in alone and text.startswith(alone):
        return len(alone)
    at = text.find(content)
    return 0 if at < 0 else at + len(content)
