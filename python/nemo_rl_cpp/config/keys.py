"""The keys of a section, as pydantic holds them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from .base import Section


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field holds: `Section`, `Section | None`, or `Section | list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if (found := section_type(argument)) is not None:
                return found
    return None


def fields_of(model: type[Section]) -> Iterator[tuple[str, Any]]:
    """(name as in YAML, field info) of a section."""
    for name, info in model.model_fields.items():
        yield info.alias or name, info


@cache
def own_keys(model: type[Section]) -> frozenset[str]:
    """Every dotted key of a section, those of its sections included."""
    found: set[str] = set()
    for name, info in fields_of(model):
        found.add(name)
        if (inner := section_type(info.annotation)) is not None:
            found.update(f"{name}.{key}" for key in own_keys(inner))
    return frozenset(found)


def forget_keys() -> None:
    """To be called when a section got or lost a key."""
    own_keys.cache_clear()
