"""What `policy.tokenizer.chat_template` means: a template, a file of one, or one of the tokenizer's by its name."""

import json
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_cpp.data.chat_template import PASSTHROUGH, ChatTemplateError, uses_messages
from nemo_rl_cpp.files.prompt_files import find_file

_ENDINGS = (".jinja", ".jinja2", ".j2", ".txt", ".json", ".tpl", ".tmpl")


def choose_template(value: object, own: str | Mapping[str, str] | None, key: str) -> str | dict[str, str] | None:
    """The template that `value`, given under `key`, stands for; `own` are those of the tokenizer.

    None passes contents through, "default" keeps the tokenizer's own. A text with jinja's marks is a template, a path is
    read (a .json file for its entry `chat_template`), a name is one of the tokenizer's named templates. Whatever it is, it
    must read `messages`: ChatTemplateError otherwise, FileNotFoundError for a path that is not there.
    """
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
        used = uses_messages(template)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{what} is wrong: {error}") from error
    if not used:
        raise ChatTemplateError(
            f"{what} never uses `messages`, so every prompt would lose its question; a template writes them out: "
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )
    return template
