"""Python values for dotted keys, laid over a file. A value never becomes text that YAML's or Hydra's grammar reads again."""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import ValidationError

from .access import mapped
from .aliases import ALIASES
from .base import Section
from .errors import ConfigError, Problem
from .keys import section_at
from .messages import known_keys, unknown_key
from .python_values import mistakes, plain, walk

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_CANONICAL = dict(ALIASES)


class GivenValues:
    """Values by dotted key, for one load.

    The file's interpolations see them: numbers as they are, everything else through a stand-in text (`stand_in(i)`) that
    `restore` replaces by the value afterwards. So `"${x}"`, a line feed or a quote in a value are what the caller gave.

    Args:
        values: dotted key -> value; a mapping for a section gives its keys one by one.
        places: dotted key -> how messages name it ("argument learning_rate"); by default "value of KEY".
        model: the configuration's class.

    Attributes:
        problems: mistakes that show without the file: unknown keys, wrong types.
        overrides: to be read after the caller's own.
    """

    def __init__(self, values: Mapping[str, object], places: Mapping[str, str], model: type[Section]) -> None:
        self._model = model
        self.problems: list[Problem] = []
        self._values: dict[str, object] = {}
        self._places: dict[str, str] = {}
        for key, value in values.items():
            place = places.get(key, f"value of {key}")
            key = _CANONICAL.get(key, key)
            if not self._is_known(key):
                self.problems.append(Problem(place, key, unknown_key(key, model)))
                continue
            try:
                for dotted, item in self._leaves(key, plain(value)):
                    self._take(dotted, item, place)
            except ConfigError as error:
                self.problems += [Problem(place, key, problem.message) for problem in error.problems]
        texts = "".join(map(repr, self._values.values()))
        self._mark = next(mark for n in range(10**6) if (mark := f"given_value_{n}_") not in texts)
        self.overrides = [
            f"++{key}={self._as_override(i, value)}" for i, (key, value) in enumerate(self._values.items())
        ]
        self._by_override = dict(zip((f"override '{text}'" for text in self.overrides), self._values))

    def _leaves(self, key: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, dict) and value and section_at(self._model, key) is not None:
            for name, item in value.items():
                yield from self._leaves(_CANONICAL.get(f"{key}.{name}", f"{key}.{name}"), item)
        else:
            yield key, value

    def _is_known(self, key: str) -> bool:
        """Whether the schema has the key, or it lies in a mapping that takes any."""
        if not _KEY.fullmatch(key):
            return False
        known, parts = known_keys(self._model), key.split(".")
        if key in known:
            return True
        above = next((dotted for n in range(len(parts) - 1, 0, -1) if (dotted := ".".join(parts[:n])) in known), None)
        section = section_at(self._model, above) if above is not None else self._model
        return section is None or section.model_config.get("extra") != "forbid"

    def _take(self, key: str, value: object, place: str) -> None:
        parent, _, name = key.rpartition(".")
        section = section_at(self._model, parent) if parent else self._model
        if not self._is_known(key):
            self.problems.append(Problem(place, key, unknown_key(key, self._model)))
            return
        field = (
            next((field for field, info in section.model_fields.items() if name in (field, info.alias)), None)
            if section is not None
            else None
        )
        if field is not None:
            try:  # as an assignment would be checked: the loader's own check lets texts be numbers
                section.__pydantic_validator__.validate_assignment(_blank(section).model_copy(), field, value)
            except ValidationError as failure:
                self.problems += [
                    Problem(place, key.removesuffix(name) + p.key, p.message) for p in mistakes(failure, section)
                ]
                return
        self._values[key] = value
        self._places[key] = place

    def _as_override(self, index: int, value: object) -> str:
        if value is None:
            return "null"
        if isinstance(value, (bool, int, float)) and abs(value) < 2**63:
            return repr(value).lower()  # exact: the shortest text that reads as the same number
        return f"{self._mark}{index}_"

    def place_of(self, where: str) -> str:
        """How messages name what an override of ours wrote; other places as they are."""
        return self._places[self._by_override[where]] if where in self._by_override else where

    def restore(self, data: dict[str, object], positions: dict[str, str]) -> None:
        """Puts the values into a loaded tree, and their places among the positions."""
        values = list(self._values.values())
        pattern = re.compile(re.escape(self._mark) + r"(\d+)_")

        def fill(leaf: object) -> object:
            if not isinstance(leaf, str):
                return leaf
            whole = pattern.fullmatch(leaf)
            return values[int(whole[1])] if whole else pattern.sub(lambda found: str(values[int(found[1])]), leaf)

        filled = {key: mapped(item, fill) for key, item in data.items()}
        data.clear()
        data.update(filled)
        for key, value in self._values.items():
            parent, name = walk(data, key)
            if parent is not None:
                parent[name] = value
            if isinstance(value, (dict, list)):  # of which the file may have had parts
                for inner in [known for known in positions if known.startswith(f"{key}.")]:
                    del positions[inner]
            positions[key] = self._places[key]


@cache
def _blank(section: type[Section]) -> Section:
    return section.model_construct()
