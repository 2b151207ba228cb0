"""The keys of a section, as pydantic holds them."""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from pydantic.fields import FieldInfo

from .base import Section


def section_type(annotation: object) -> type[Section] | None:
    """The section that a field holds: `Section`, `Section | None`, or `Section | list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if (found := section_type(argument)) is not None:
                return found
    return None


def fields_of(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """(name as in YAML, field info) of a section."""
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def section_at(model: type[Section], dotted: str) -> type[Section] | None:
    """The class of the section at a dotted key."""
    found: type[Section] | None = model
    for part in dotted.split("."):
        info = dict(fields_of(found)).get(part) if found is not None else None
        found = section_type(info.annotation) if info is not None else None
    return found


def dotted_fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field info) of a section and of those within it."""
    for name, info in fields_of(model):
        yield f"{prefix}{name}", info
        if (inner := section_type(info.annotation)) is not None:
            yield from dotted_fields(inner, f"{prefix}{name}.")


@cache
def own_keys(model: type[Section]) -> frozenset[str]:
    """Every dotted key of a section, those of its sections included."""
    return frozenset(key for key, _ in dotted_fields(model))


def forget_keys() -> None:
    """To be called when a section got or lost a key."""
    own_keys.cache_clear()


def mark_of(info: FieldInfo) -> Mapping[str, object]:
    """What `only` or `no_effect` said of a key; empty where neither did."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def additions(overrides: Sequence[str], model: type[Section]) -> list[str]:
    """The overrides, with `++` before each plain one that changes a free mapping or a key in it."""
    free = free_mappings(model)

    def added(override: str) -> str:
        key = override.partition("=")[0].strip()
        inside = any(key == mapping or key.startswith(f"{mapping}.") for mapping in free)
        return f"++{override}" if inside and "=" in override else override

    return [added(override) for override in overrides]


@cache
def free_mappings(model: type[Section]) -> frozenset[str]:
    """Dotted keys of the mappings that take any key: the user's own, so an override may name one that no file sets, without
    Hydra's `+`. Not `env`, whose sections are checked or belong to a file's environments."""
    return frozenset(key for key, info in dotted_fields(model) if _is_mapping(info.annotation) and key != "env")


def _is_mapping(annotation: object) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_is_mapping(part) for part in typing.get_args(annotation))
    return annotation is dict or typing.get_origin(annotation) is dict
