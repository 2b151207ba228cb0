"""Chat templates: the jinja programs that turn a list of messages into the text a model was trained on.

They come with model folders, that is from strangers, so they run in jinja's sandbox: a template can read the messages
and build text, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Contents of all messages, one after another, and nothing added: what `chat_template: null` means."""


class ChatTemplateError(ValueError):
    """A chat template that cannot be compiled, or that refuses or fails on the given messages."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text in some templates; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which a language model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template does not compile: {error}") from error


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of one conversation.

    `variables` are further names the template may read (special tokens, `chat_template_kwargs`).
    `continue_final_message` cuts the text right after the last message's content, so that the model goes on with it.
    Raises ChatTemplateError (a ValueError) when the template is wrong or refuses the messages.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: a text cannot both begin "
            "a new turn and go on with the last one"
        )
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            raise ValueError(
                f"tools must be JSON schemas (dictionaries), got {type(tool).__name__}: "
                "describe the function as {'type': 'function', 'function': {...}}"
            )
    try:
        text = _compile(template).render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except ChatTemplateError:
        raise
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error
    if not continue_final_message:
        return text
    last = str(messages[-1]["content"]).strip()
    at = text.rfind(last)
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: the template changes the last message's content, so the place "
            "to go on from cannot be found"
        )
    return text[: at + len(last)]
