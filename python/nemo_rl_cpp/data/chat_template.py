"""Chat templates: the choice of a template, its rendering, and a check that the rendered prompt contains every message.
A chat template is a jinja program that renders messages as the text on which the model was trained. Templates come with
models, so they are untrusted. As in transformers and vLLM, they run in jinja's immutable sandbox, without access to
Python internals. Their time and memory are not limited."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.files.prompt_files import find_file

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The template for `chat_template: null`: the concatenated contents of all messages."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message, in order of precedence


T = TypeVar("T")
Messages = Sequence[Mapping[str, object]]
Tools = Sequence[Mapping[str, object]] | None


class ChatTemplateError(ValueError):
    """Raised if a chat template does not compile, rejects the messages, or fails on them."""


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}...{% endgeneration %}`, which marks assistant text; only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


@lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    # jinja's own filter escapes <, > and & for HTML, which a language model must not see
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _guarded(what: str, action: Callable[[], T]) -> T:
    """Return the result of `action`; turn any error into a ChatTemplateError that begins with `what`."""
    try:
        return action()
    except ChatTemplateError:
        raise
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"{what}: {error}") from error
    except Exception as error:  # errors in a template may raise any Python exception
        raise ChatTemplateError(f"{what}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    return _guarded("the chat template does not compile", lambda: _environment().from_string(template))


def render_chat_template(
    template: str, messages: Messages, *, add_generation_prompt: bool = False, tools: Tools = None,
    variables: Mapping[str, object] | None = None,
) -> str:  # fmt: skip
    """Return one conversation as text, rendered as by transformers. Keys of a message whose value is None are omitted.
    With `add_generation_prompt` the text ends with the start of an assistant message. `variables` are further variables
    for the template. Raise ChatTemplateError (a ValueError) if it has an error or rejects the messages."""
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            form = "{'type': 'function', 'function': {...}}"
            raise ChatTemplateError(f"tools must be JSON schemas such as {form}, not {type(tool).__name__}")
    seen = _as_templates_see_them(messages)
    compiled = _compile(template)
    further = {"documents": None, **{name: _plain(value) for name, value in (variables or {}).items()}}
    return _guarded(
        "the chat template failed on these messages",
        lambda: compiled.render(
            messages=seen, tools=_plain(tools), add_generation_prompt=add_generation_prompt, **further
        ),
    )


def _as_templates_see_them(messages: object) -> list[dict[str, object]]:
    """Return copies of the messages for a chat template: with values of JSON types, without keys whose value is None,
    and with the reasoning under both names that templates read, `thinking` and `reasoning_content`."""
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise ChatTemplateError(f"a conversation is a list of {{'role', 'content'}}, not {type(messages).__name__}")
    seen = []
    for message in messages:
        if hasattr(message, "model_dump"):
            message = message.model_dump()
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"a message is a mapping {{'role', 'content'}}, got {type(message).__name__}")
        plain = {key: _plain(value) for key, value in message.items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        seen.append(plain)
    return seen


def _plain(value: object) -> object:
    """Convert `value` to JSON types, because a template could leave the sandbox through methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value) if type(value) in (list, tuple) else list)(_plain(item) for item in value)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return _plain(value.tolist())
    return f"<{type(value).__name__}>"


_ENDINGS = (".jinja", ".jinja2", ".j2", ".txt", ".json", ".tpl", ".tmpl")


def choose_template(value: object, own: str | Mapping[str, str] | None, key: str) -> str | dict[str, str] | None:
    """Return the template that `value` of the configuration key `key` selects. `own` is the tokenizer's template, or
    its named templates.

    None selects `PASSTHROUGH`, which joins the contents of the messages, and "default" the tokenizer's template. A
    string with `{{` or `{%` is itself a template. A name selects one of the named templates. A path is read; a .json
    file must have the entry `chat_template`. Raise FileNotFoundError for a missing file, and ChatTemplateError for any
    other value or for a template that does not use `messages`."""
    if value is None:
        return PASSTHROUGH
    if not isinstance(value, str):
        raise ChatTemplateError(f"{key} must be a text, null or 'default', not {type(value).__name__}")
    if value.strip().lower() == "default":
        return own
    if "{{" in value or "{%" in value:
        return _checked(value, f"{key} is a template that")
    if isinstance(own, Mapping) and value in own:
        return _checked(own[value], f"{key}: the tokenizer's template {value!r}")
    if _is_path(value):
        file = find_file(value, key)
        return _checked(_read(file, key), f"{key}: the template of {file}")
    named = f" (its named templates are {', '.join(sorted(own))})" if isinstance(own, Mapping) else ""
    raise ChatTemplateError(
        f"{key} is {value!r}: neither a template, which uses `messages`, nor a file, nor a template of the tokenizer{named}; "
        "give a .jinja file, the text of a template, default (the tokenizer's own) or null (contents as they are)"
    )


def _is_path(value: str) -> bool:
    if not value.strip() or "\n" in value:
        return False
    return value.lower().endswith(_ENDINGS) or "/" in value or Path(value).expanduser().is_file()


def _read(file: Path, key: str) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() != ".json":
            return text
        template = json.loads(text)["chat_template"]
    except UnicodeDecodeError:
        raise ChatTemplateError(f"{key}: {file} is not UTF-8 text") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ChatTemplateError(f"{key}: {file} is no JSON object with the entry chat_template") from None
    if not isinstance(template, str):
        raise ChatTemplateError(f"{key}: the entry chat_template of {file} is no text")
    return template


def _checked(template: str, what: str) -> str:
    try:
        _compile(template)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{what} is wrong: {error}") from error
    if "messages" not in _variables(template):
        raise ChatTemplateError(
            f"{what} never uses `messages`, so every prompt would lose its question; a template writes them out: "
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )
    return template


def template_variables(tokenizer: TokenizerType) -> set[str]:
    """Return the names of the variables, such as `enable_thinking`, that the tokenizer's chat template reads and a
    caller may set."""
    own = getattr(tokenizer, "chat_template", None) or ""
    names = set().union(*map(_variables, own.values() if isinstance(own, Mapping) else [own]))
    return names - _environment().globals.keys() - {"messages", "tools", "add_generation_prompt"}


def _variables(template: str) -> set[str]:
    return jinja2.meta.find_undeclared_variables(_environment().parse(template))


def render_prompt(
    tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool = True, tools: Tools = None,
    **variables: object,
) -> str:  # fmt: skip
    """Return a conversation as text, rendered by the chat template, which may read `variables`. Raise
    ChatTemplateError if the text lacks a message or the tools."""
    text = _apply(tokenizer, messages, add_generation_prompt, tools, variables)
    if tools and text == _apply(tokenizer, messages, add_generation_prompt, None, variables):
        raise ChatTemplateError(
            "the chat template leaves out the tools: the model would never see them; take the column tools out of the data, "
            "or use a template that writes them"
        )
    missing = [i for i, message in enumerate(messages) if _content(message) not in text]
    # A template may change a content (escape it, drop its reasoning), and a short content may be in the text by chance.
    # So render numbers in place of the contents, to find out which the template includes.
    marks = [f"9001{i}1009" for i in range(len(messages))]  # digits, which filters for letters do not change
    marked = [{**m, "content": mark} if _content(m) else m for m, mark in zip(messages, marks)]
    try:
        probe = _apply(tokenizer, marked, add_generation_prompt, tools, variables)
        lost = [i for i, message in enumerate(messages) if _content(message) and marks[i] not in probe]
    except ValueError:  # the template inspects contents
        lost = missing
    if lost:
        raise ChatTemplateError(_leaves_out(messages, lost[0], getattr(tokenizer, "section", "policy.tokenizer")))
    return text


def _leaves_out(messages: Messages, i: int, section: str) -> str:
    role = messages[i]["role"]
    advice = "leave it out, or put its text into the user's message"
    if section:
        file = ", or put the text into prompt_file" if role == "system" else ""
        advice = f"set {section}.chat_template to a template for these roles{file}"
    content = _content(messages[i])[:60]
    return f"the chat template leaves out message {i} ({role}, {content!r}): the model would never see it; {advice}"


def _apply(
    tokenizer: TokenizerType, messages: Messages, add_generation_prompt: bool, tools: Tools, variables: Mapping[str, object]
) -> str:  # fmt: skip
    options = {**variables, "tools": tools} if tools else variables
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, add_special_tokens=False, **options
        )
    except ValueError:
        raise
    except Exception as error:  # transformers does not catch errors in a template
        text = f"the chat template failed on these messages: {type(error).__name__}: {error}"
        raise ChatTemplateError(text) from error


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def system_part(tokenizer: TokenizerType, messages: Messages, text: str) -> int:
    """Return how many leading characters of `text`, a rendered conversation, belong to its first message, the system
    message. This is the length of that message rendered alone, if `text` begins with the result. If not (the template
    rejects a lone system message, or merges it into the user's turn), return the position in `text` where the message's
    content ends, or 0 if the content is missing."""
    try:
        alone = _apply(tokenizer, messages[:1], False, None, {})
    except ValueError:  # many templates reject a system message alone
        alone = ""
    content = _content(messages[0])
    if content in alone and text.startswith(alone):
        return len(alone)
    at = text.find(content)
    return 0 if at < 0 else at + len(content)
