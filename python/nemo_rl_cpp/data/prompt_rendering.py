"""Rendering of prompts: the question is inserted into a prompt file, and messages are rendered with the
chat template.
"""

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
# Text before a `{}` that is its argument: a LaTeX command with its earlier arguments, or a sub- or superscript.
_LATEX = re.compile(r"(\\[A-Za-z]+\*?(\[[^\]\n]*\])?(\{[^{}\n]*\}|\{\{[^{}\n]*\}\})*|[\^_])$")


def fill_prompt(prompt: str, question: str) -> str:
    """Return `prompt` with the question in place of its placeholder. Raise ValueError unless it has exactly one
    placeholder.
    """
    before, after = split_prompt(prompt)
    return before + question + after


@lru_cache(maxsize=64)
def split_prompt(prompt: str) -> tuple[str, str]:
    """Return the text before and after the placeholder `{}`. Raise ValueError, with the line in its message, unless
    there is exactly one.

    A file whose other braces are all doubled is parsed as by `str.format`. Otherwise other braces are literal, and a
    `{}` that is the argument of a LaTeX command is not a placeholder.
    """
    tokens = [(found.start(), found[0]) for found in _TOKEN.finditer(prompt)]
    places = [(start, token) for start, token in tokens if token in ("{}", "{0}")]
    formatted = all(token in ("{{", "}}", "{}", "{0}") for _, token in tokens) and len(places) <= 1
    if not formatted:
        if "{{}}" in prompt:
            raise ValueError(
                f"line {_line(prompt, prompt.index('{{}}'))} has doubled braces {{{{}}}}, but other braces of the file are single: double all "
                "braces that are text, or none"
            )
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


_KEPT: set[tuple[object, ...]] = set()  # combinations (template, roles, ...) known to render all messages


def render_prompt(
    tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool = True, tools: Tools = None
) -> str:
    """Return a conversation as text, rendered by the chat template. Raise ChatTemplateError if the template omits a
    message.
    """
    text = _apply(tokenizer, messages, add_generation_prompt, tools)
    missing = [i for i, message in enumerate(messages) if _content(message) not in text]
    shape = (
        type(tokenizer), str(getattr(tokenizer, "chat_template", None)), str(getattr(tokenizer, "chat_template_kwargs", None)),
        tuple((message.get("role"), bool(_content(message))) for message in messages), bool(tools),
    )  # fmt: skip
    if missing or shape not in _KEPT:
        # A template may change a content (escape it, drop its reasoning), and a short content may be in the text by
        # chance. So render numbers in place of the contents, to find out which the template includes.
        marked = [{**m, "content": _mark(i)} if _content(m) else m for i, m in enumerate(messages)]
        try:
            probe = _apply(tokenizer, marked, add_generation_prompt, tools)
            lost = [i for i, message in enumerate(messages) if _content(message) and _mark(i) not in probe]
        except ValueError:  # the template inspects contents
            lost = missing
        if lost:
            raise ChatTemplateError(_leaves_out(messages, lost[0], getattr(tokenizer, "section", "policy.tokenizer")))
        if len(_KEPT) > 256:
            _KEPT.clear()
        _KEPT.add(shape)
    return text


def _leaves_out(messages: Messages, i: int, section: str) -> str:
    role = messages[i]["role"]
    begin = f"the chat template leaves out message {i} ({role}, {_content(messages[i])[:60]!r}): the model would never see it; "
    if not section:
        return f"{begin}leave it out, or put its text into the user's message"
    return f"{begin}set {section}.chat_template to a template for these roles" + (
        ", or put the text into prompt_file" if role == "system" else ""
    )


def _mark(i: int) -> str:
    return f"9001{i}1009"  # digits, which filters for letters do not change


def _apply(tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool, tools: Tools) -> str:
    options = {"tools": tools} if tools else {}
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, add_special_tokens=False, **options
        )
    except ValueError:
        raise
    except Exception as error:  # transformers does not catch errors in a template
        raise ChatTemplateError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def system_part(tokenizer: TokenizerType, messages: Messages, text: str) -> int:
    """Return how many leading characters of `text`, the prompt rendered from `messages`, belong to the first (system)
    message.

    This is the length of the message rendered alone, if `text` begins with that. If the template cannot render a system
    message alone, or merges it into the user's turn, it is everything up to the end of its content. Return 0 if the
    content is not in the text.
    """
    try:
        alone = _apply(tokenizer, messages[:1], False, None)
    except ValueError:  # many templates reject a system message alone
        alone = ""
    content = _content(messages[0])
    if content in alone and text.startswith(alone):
        return len(alone)
    at = text.find(content)
    return 0 if at < 0 else at + len(content)
