r"""The one place `{}` of a prompt file, where the question goes.

Two ways of writing are understood. Files for `str.format` double every other brace (`\boxed{{}}` stands for `\boxed{}`).
In every other file all braces stand for themselves but the place, and `\boxed{}` or `^{}` is LaTeX and no place where
another `{}` stands by itself. What is not clear is refused.
"""

import re
from functools import lru_cache

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
