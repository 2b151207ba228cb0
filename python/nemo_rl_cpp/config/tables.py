"""Tables of what a configuration chooses by a name.

A table is the one place that says what a name stands for. The values that the schema allows, the keys that it knows and the page
docs/configuration.md follow from it, also for an entry that a program adds while it runs.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from nemo_rl_cpp.dotted_names import PythonObjectRef, is_user_defined

from .base import Section, forget_keys, section_type


@dataclass(frozen=True)
class Entry:
    """What a name stands for.

    Attributes:
        target: `package.module:Name`, imported when it is first asked for, or the object itself.
    """

    target: object

    def load(self) -> Any:
        return pkgutil.resolve_name(self.target) if isinstance(self.target, str) else self.target


E = TypeVar("E", bound=Entry)


class Table(Mapping[str, Any], Generic[E]):
    """name -> the object that it stands for, imported when it is asked for. `entries` says the rest without an import."""

    def __init__(self, what: str, entries: Mapping[str, E]) -> None:
        self.what = what
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def add(
        self, name: str, entry: E, section: type[BaseModel] | None = None, keys: Mapping[str, FieldInfo] | None = None
    ) -> None:
        """Add an entry; `section` takes `keys` (name -> field) from then on. Raise ValueError where the name is taken."""
        if name in self.entries:
            raise ValueError(f"the {self.what} {name} is there already: choose another name")
        if section is not None:
            add_keys(section, keys or {})
        self.entries[name] = entry


class OneOf:
    """The mark of a text that must be a name of `names()`, as a Literal of what these are at the time of the check; with `dotted`
    also any dotted name, of which `checks` says later whether it leads anywhere."""

    def __init__(self, names: Callable[[], list[str]], dotted: bool = False) -> None:
        self.names = names
        self.dotted = dotted

    @property
    def choices(self) -> list[str]:
        """What may be written, for the documentation."""
        return [*self.names(), *(["a dotted name"] if self.dotted else [])]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: object) -> str:
        names = self.names()
        if self.dotted and is_user_defined(value):
            return value if isinstance(value, PythonObjectRef) else str(value)
        if not isinstance(value, str) or value not in names:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(repr(name) for name in self.choices)})
        return value


def add_keys(section: type[BaseModel], keys: Mapping[str, FieldInfo]) -> None:
    """Give a section, and what derives from it, those of the keys that it does not have. Whole configurations take them, too."""
    for each in _below(section):
        each.model_fields.update({name: info for name, info in keys.items() if name not in each.model_fields})
    rebuild(section)


def rebuild(section: type[BaseModel]) -> None:
    """Let pydantic read the keys of a section again, and of every section that holds it."""
    forget_keys()
    level, done = _below(section), set()
    while level:
        for each in level:
            each.model_rebuild(force=True)
        done |= level
        holders = _below(Section)
        level = {
            each
            for each in holders - done
            if any(section_type(info.annotation) in level for info in each.model_fields.values())
        }


def _below(cls: type[BaseModel]) -> set[type[BaseModel]]:
    return {cls}.union(*(_below(each) for each in cls.__subclasses__()))
