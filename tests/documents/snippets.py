"""The fenced code blocks of all documents, each with the mark above it that says how it is tested.

A mark is a comment on the line above the fence:

<!-- run -->                      The block runs unchanged: Python code, or each command of a bash block. The blocks of
                                  a document share a folder, and its Python blocks share their names.
<!-- run: A as B; C as D -->      The block runs with A replaced by B and C by D, which makes it short.
<!-- file: NAME -->               The block is written into that folder as NAME. Without a name, its first line, a
                                  comment, gives the name.
<!-- check -->                    The configuration and overrides of each command are checked; nothing is trained.
<!-- loads: FILE -->              The block is YAML that loads on top of the shipped configuration FILE.
<!-- tested by: FILE::TEST -->    Another test does what the block says.
<!-- needs: WORD -->              The block does not run: WORD is one of `NEEDS`. The configurations of its commands
                                  are still loaded.

Blocks of `text` and `json` show output or data, and have no mark."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "hub": "a model hub", "network": "a package index or a repository", "gpu": "a GPU", "cluster": "several machines",
    "minutes": "minutes of training", "privileges": "rights of the system's administrator, or settings of the machine",
    "code": "the reader's own code around it",
}  # fmt: skip
SHOWN = {"text", "json"}
KINDS = {"run", "file", "check", "loads", "tested by", "needs"}
_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.+?))? -->")
_FENCE = re.compile(r"( *)```(\w*)$")
_RUNS = re.compile(r"(?:examples/|nemo_rl_cpp\.)(run_\w+)(?:\.py)?")


@dataclass(frozen=True)
class Snippet:
    """A fenced code block. `kind` and `value` come from its mark; without a mark both are empty."""

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
    """A command of a bash block. `config` is the configuration that it names; None: the script's default."""

    script: str
    config: str | None
    overrides: tuple[str, ...]


def documents() -> list[Path]:
    outside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")]
    return [*outside, *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(text: str, document: str = "") -> list[Snippet]:
    """Return the fenced code blocks of a document, in order."""
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
    """Yield the words of each command of a bash block."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(re.sub(r"\$(?=')", "", line), comments=True):
            yield words


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a bash block that name a configuration, or that use the script's default one."""
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
