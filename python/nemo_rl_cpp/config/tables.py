"""Tables of the names that a configuration may use, such as those of loggers and datasets.

Each name is defined in one table only. The values that the schema allows, the keys that it knows and
docs/configuration.md are derived from the tables, including entries that a program adds at run time.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from nemo_rl_cpp.dotted_names import PythonObjectRef, is_user_defined

from .base import Section, own_keys, section_type


@dataclass(frozen=True)
class Entry:
    """The definition of a name in a table.

    Attributes:
        target: the object, or `package.module:Name`, from which `load` imports it.
    """

    target: object

    def load(self) -> Any:
        return pkgutil.resolve_name(self.target) if isinstance(self.target, str) else self.target


E = TypeVar("E", bound=Entry)


class Table(Mapping[str, Any], Generic[E]):
    """A mapping from names to objects, which imports an object on access. `entries` has the definitions, without
    imports. `what` describes an entry in messages."""

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
        """Add an entry, and add `keys` (name -> field) to the class `section`. Raise ValueError if the name is
        taken."""
        if name in self.entries:
            raise ValueError(f"the {self.what} {name} is there already: choose another name")
        if section is not None:
            add_keys(section, keys or {})
        self.entries[name] = entry


class OneOf:
    """The type annotation of a string that must be one of `names()`, a function that is called at each check. With
    `dotted`, any dotted name is allowed too; the package `checks` verifies later that it can be imported."""

    def __init__(self, names: Callable[[], list[str]], dotted: bool = False) -> None:
        self.names = names
        self.dotted = dotted

    @property
    def choices(self) -> list[str]:
        """Return the allowed values, for the documentation."""
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
    """Add `keys` to a section and its subclasses, except keys that they already have, so that configurations accept
    them."""
    for each in _below(section):
        each.model_fields.update({name: info for name, info in keys.items() if name not in each.model_fields})
    rebuild(section)


def rebuild(section: type[BaseModel]) -> None:
    """Make pydantic rebuild the validators of a section and of every section that contains it."""
    own_keys.cache_clear()
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
