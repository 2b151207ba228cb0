"""What stands in a file or on the command line, for messages: a value as it was written, a tab, the kind of a file."""

import re
from collections.abc import Iterable
from pathlib import Path

_OVERRIDE = re.compile(r"override '(?P<text>.*)'", re.DOTALL)
_PLAIN = r"[^\s\[\]{}&*!|>'\"%@`#,][^,\[\]{}]*?"  # a plain scalar of a flow collection


def quotes_advice(where: str, key: str) -> str:
    """How to write the value of a key so that it stays a text, in brackets; advice that works when it is followed."""
    override = _OVERRIDE.fullmatch(where)
    if override:
        name, equals, value = override["text"].partition("=")
        if equals and name.lstrip("+") == key:
            return f" (write \"{name}='{value}'\", with both pairs of quotes)"
    text = written_text(where, key)
    return f" (write '{text}' in quotes)" if text is not None else " (write it in quotes)"


def written_text(where: str, key: str) -> str | None:
    """The value of a key as its file has it, at the place "file:line"; None where the line does not show it."""
    line = line_at(where)
    if line is None:
        return None
    name = key.rpartition(".")[2]
    if name.isdigit():
        return _item(line, int(name))
    found = re.search(rf"(?:^|[\s{{,])['\"]?{re.escape(name)}['\"]?\s*:\s+(?P<rest>.*)", line)
    if not found:
        return None
    in_braces = line[: found.start("rest")].count("{") > line[: found.start("rest")].count("}")
    pattern = rf"({_PLAIN})\s*[,}}]" if in_braces else r"([^\s'\"\[{&*|>#].*?)\s*(?:\s#.*)?$"
    value = re.match(pattern, found["rest"])
    return value[1] if value else None


def _item(line: str, index: int) -> str | None:
    item = re.match(r"\s*(?:- )*-\s+([^\s'\"\[{&*|>#].*?)\s*(?:\s#.*)?$", line)
    if item:
        return item[1]
    inside = re.search(r"\[(.*)\]", line)
    items = [part.strip() for part in inside[1].split(",")] if inside else []
    return items[index] if index < len(items) and re.fullmatch(_PLAIN, items[index]) else None


def line_at(where: str) -> str | None:
    """The line of a place "file:line"; None where there is none."""
    file, _, number = where.rpartition(":")
    if not number.isdigit() or not Path(file).is_file():
        return None
    lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[int(number) - 1] if 0 < int(number) <= len(lines) else None


def explained(message: str) -> str:
    """What the reader of YAML says; a tab in the line that it names is named."""
    place = re.match(r"(?P<where>[^\n]*?:\d+): ", message)
    line = line_at(place["where"]) if place else None
    if place and line is not None and "\t" in line:
        return f"{place['where']}: there is a tab in this line, which YAML does not take for spaces: write spaces in its place"
    return message


KINDS = {
    "grpo": ("a GRPO run", "run_grpo_math"),
    "ppo": ("a PPO run", "run_ppo"),
    "eval": ("an evaluation", "run_eval"),
}
"""Section that makes a file one of its kind -> (kind in words, script that runs it)."""


def of_another_kind(sections: Iterable[str], own: str) -> tuple[str, str] | None:
    """(section, what to say about it) where a file's sections make it a configuration of another kind than `own` (a key of
    KINDS); else None."""
    there = set(sections)
    other = next((name for name in KINDS if name in there), None) if own not in there else None
    if other is None:
        return None
    words, script = KINDS[other]
    return (
        other,
        f"makes the file a configuration of {words}, not of {KINDS[own][0]}: it is run by examples/{script}.py (python -m nemo_rl_cpp.{script})",
    )
