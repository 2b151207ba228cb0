"""Turns a conversation into the text of a prompt, and checks that the template lost no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.chat_template import ChatTemplateError
from nemo_rl_cpp.data.interfaces import TokenizerType

if TYPE_CHECKING:
    Messages = Sequence[Mapping[str, object]]
    Tools = Sequence[Mapping[str, object]] | None

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
