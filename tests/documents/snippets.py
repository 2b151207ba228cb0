"""The fenced blocks of all documents, each with the mark above it that says how it is tested.

A mark is a comment on the line above the fence:

<!-- run -->                      Run as it stands: a Python block, or each command of a bash block. The blocks of a document share a
                                  folder, and its Python blocks their names.
<!-- run: A as B; C as D -->      Run with the text A replaced by B, and C by D, which makes it short.
<!-- file: NAME -->               Written into that folder as NAME; without a name the block's first line says it as a comment.
<!-- check -->                    The configuration and overrides of each command are checked; nothing is trained.
<!-- loads: FILE -->              YAML that loads on top of the shipped configuration FILE.
<!-- tested by: FILE::TEST -->    Another test does what the block says.
<!-- needs: WORD -->              Not run: WORD is one of `NEEDS`. The configurations of its commands load all the same.

Blocks of `text` and `json` show what is printed or read, and have no mark.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "hub": "a model hub",
    "network": "a package index or a repository",
    "gpu": "a GPU",
    "cluster": "several machines",
    "minutes": "minutes of training",
    "privileges": "rights of the system's administrator, or settings of the machine",
    "code": "the reader's own code around it",
}
SHOWN = {"text", "json"}
KINDS = {"run", "file", "check", "loads", "tested by", "needs"}
_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.+?))? -->")
_FENCE = re.compile(r"( *)```(\w*)$")
_RUNS = re.compile(r"(?:examples/|nemo_rl_cpp\.)(run_\w+)(?:\.py)?")


@dataclass(frozen=True)
class Snippet:
    """A fenced block. `kind` and `value` are those of its mark; both are empty where it has none."""

    document: str
    line: int
    language: str
    text: str
    kind: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a bash block that names a configuration."""

    script: str
    config: str | None
    overrides: tuple[str, ...]


def documents() -> list[Path]:
    outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")]
    return [*outside, *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(text: str, document: str = "") -> list[Snippet]:
    """The fenced blocks of a document, in order."""
    found, lines, i = [], text.splitlines(), 0
    while i < len(lines):
        fence = _FENCE.match(lines[i])
        if fence is None:
            i += 1
            continue
        end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
        body = "\n".join(line.removeprefix(fence[1]) for line in lines[i + 1 : end]) + "\n"
        mark = _MARK.fullmatch(lines[i - 1].strip()) if i else None
        kind, value = (mark[1], mark[2] or "") if mark else ("", "")
        found.append(Snippet(document, i + 1, fence[2], body, kind, value))
        i = end + 1
    return found


def all_snippets() -> list[Snippet]:
    return [s for path in documents() for s in snippets(path.read_text(), path.relative_to(ROOT).as_posix())]


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each command of a bash block."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(re.sub(r"\$(?=')", "", line), comments=True):
            yield words


def commands(text: str) -> Iterator[Command]:
    """The commands of a bash block that name a configuration, or would take the script's own."""
    for words in lines_of(text):
        place = next((i for i, word in enumerate(words) if _RUNS.fullmatch(word)), None)
        if place is not None:
            script = _RUNS.fullmatch(words[place])[1]
        elif "nemo-rl-cpp" in words and (place := words.index("nemo-rl-cpp") + 1) < len(words):
            script = words[place]
            if script not in ("train", "eval", "check"):
                continue
        else:
            continue
        rest = [word for word in words[place + 1 :] if word not in ("--dry-run", "--debug", ";", "done")]
        config = rest.pop(rest.index("--config") + 1) if "--config" in rest else None
        yield Command(script, config, tuple(word for word in rest if word != "--config" and "$" not in word))
