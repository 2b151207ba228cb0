"""All mistakes of a configuration at once."""

from dataclasses import dataclass

LONGEST_NAME = 200  # characters of a key in a message


@dataclass(frozen=True)
class Problem:
    """One mistake: where it was written ("grpo.yaml:12", "override 'a.b=c'", or ""), the dotted key, and what to do."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        name = self.key if self.key.isprintable() else self.key.encode("unicode_escape").decode()
        if len(name) > LONGEST_NAME:  # nobody's key, but somebody's text in a key's place
            name = f"{name[:LONGEST_NAME]}..."
        subject = f"{name} " if self.key else ""
        return f"{place}{subject}{self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be used. `str()` lists every mistake, one a line; `problems` holds them."""

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(
            set(problems), key=lambda p: (p.where.rpartition(":")[0], _line(p.where), p.key, p.message)
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple:
        return type(self), (self.problems,)


def _line(where: str) -> int:
    tail = where.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


class Report:
    """Collects mistakes and knows where each key was written. `file` is named for what is written nowhere."""

    def __init__(self, positions: dict[str, str], file: str = ""):
        self._positions = positions
        self._file = file
        self.problems: list[Problem] = []

    def where(self, dotted: str) -> str:
        """Place of the key, or of the section around it when the key is a default, or the file's first line."""
        while dotted:
            if dotted in self._positions:
                return self._positions[dotted]
            dotted = dotted.rpartition(".")[0]
        return f"{self._file}:1" if self._file else ""

    def is_written(self, dotted: str) -> bool:
        return dotted in self._positions

    def nearness(self, dotted: str) -> int:
        """How near to the user the key was written: 3 by an override or an argument, 2 in the run's own file, 1 in a parent of it,
        0 nowhere."""
        if dotted not in self._positions:
            return 0
        file = self._positions[dotted].rpartition(":")[0]
        if not file or self._positions[dotted].startswith("override "):
            return 3
        return 2 if file == self._file else 1

    def has_problem(self, dotted: str) -> bool:
        """Whether the key, a section around it or a key in it is wrong already: consequences are not reported."""
        return any(
            p.key == dotted or dotted.startswith(p.key + ".") or p.key.startswith(dotted + ".")
            for p in self.problems
            if p.key
        )

    def add(self, dotted: str, message: str, *related: str) -> None:
        """Reports a mistake at `dotted`, unless it or a `related` key is wrong already.

        Its place is that of the first of these keys that an override sets, else of the first that a file sets.
        """
        keys = (dotted, *related)
        if any(self.has_problem(key) for key in keys):
            return
        overridden = (key for key in keys if self._positions.get(key, "").startswith("override "))
        written = next(overridden, None) or next((key for key in keys if self.is_written(key)), dotted)
        self.problems.append(Problem(self.where(written), dotted, message))
