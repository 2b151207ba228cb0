"""Reads a Dockerfile into its instructions, for tests/documents/test_dockerfiles.py."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = ("FROM", "SHELL", "RUN", "ARG", "ENV", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD")
"""What is understood here; a Dockerfile with more is refused."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, what follows it, its options (`--from=build`), and the line that it begins at."""

    name: str
    text: str
    options: dict[str, str]
    line: int

    def words(self) -> list[str]:
        """The words of a list in JSON, or those between spaces."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()

    def pairs(self) -> dict[str, str]:
        """The variables of ENV or ARG with their values; quotes are gone, references are left as they are."""
        found = re.findall(r'(\w+)(?:=("[^"]*"|\S*))?', self.text)
        return {name: value.strip('"') for name, value in found}


@dataclass
class Stage:
    """What stands between one FROM and the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name == name]


def instructions(text: str) -> list[Instruction]:
    """All instructions; ValueError with the line of one that is not known."""
    found: list[Instruction] = []
    waiting, begin = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (waiting or line.strip()):
            continue
        begin = begin if waiting else number
        waiting += line
        if line.endswith("\\"):
            waiting = waiting[:-1]
            continue
        name, _, rest = waiting.strip().partition(" ")
        if name.upper() not in KNOWN:
            raise ValueError(f"line {begin}: {name} is not one of {', '.join(KNOWN)}")
        options = {}
        while match := re.match(r"\s*--([\w-]+)=(\S+)\s*", rest):
            options[match[1]], rest = match[2], rest[match.end() :]
        found.append(Instruction(name.upper(), rest.strip(), options, begin))
        waiting = ""
    if waiting:
        raise ValueError(f"line {begin}: the file ends within an instruction")
    return found


def stages(path: Path) -> list[Stage]:
    """The stages of a file; ValueError where something stands before the first FROM."""
    found: list[Stage] = []
    for instruction in instructions(path.read_text()):
        if instruction.name == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            found.append(Stage(base.strip(), name.strip() or str(len(found))))
        elif found:
            found[-1].instructions.append(instruction)
        else:
            raise ValueError(f"line {instruction.line}: {instruction.name} stands before the first FROM")
    return found
