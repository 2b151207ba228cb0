"""One thing that a check found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`level` "error": the run cannot succeed and does not start; "warning": it starts, and the sentence is printed.

    `key` is the dotted key to change ("" where none is), `message` one sentence: what is so, what was expected, what to do.
    """

    level: Literal["error", "warning"]
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key} {self.message}" if self.key else self.message
