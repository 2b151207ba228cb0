"""Keys of free mappings (`chat_template_kwargs`, `hf_config_overrides`, `vllm_kwargs`, ...): the user's own, so an override may name
one that no file sets, without Hydra's `+`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache

from .base import Section
from .keys import fields_of, section_type


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
    """Dotted keys of the mappings that take any key. Not `env`, whose sections are checked or belong to a file's environments."""
    return frozenset(key for key in _walk(model, "") if key != "env")


def _walk(section: type[Section], prefix: str) -> Iterator[str]:
    for name, info in fields_of(section):
        inner = section_type(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
        elif _is_mapping(info.annotation):
            yield prefix + name


def _is_mapping(annotation: object) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_is_mapping(part) for part in typing.get_args(annotation))
    return annotation is dict or typing.get_origin(annotation) is dict
