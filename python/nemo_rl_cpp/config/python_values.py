"""Configurations made in Python: values stay what they are, mistakes are ConfigErrors as from the loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.dotted_names import PythonObjectRef

from .errors import ConfigError, Problem, Report

if TYPE_CHECKING:
    from .base import Section
    from .master import WholeConfig

Master = TypeVar("Master", bound="WholeConfig")
_MAX_DEPTH = 64
_LONGEST = 1000  # characters of a message, which may show a value


def plain(value: object, depth: int = 0) -> object:
    """`value` with tuples and arrays as lists, paths as texts and scalars of numpy and torch as Python's; all else as it is.

    Raises ConfigError for what no configuration can hold: a key that is no text, or nesting without an end.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if isinstance(value, str):
        return value if isinstance(value, PythonObjectRef) else str(value)
    if depth > _MAX_DEPTH:
        raise ConfigError([Problem("", "", f"a value is nested more than {_MAX_DEPTH} deep")])
    if isinstance(value, Mapping):
        return plain_values(value, depth)
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value), depth)
    # a scalar or an array of numpy or torch, a column of pandas
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    return value


def plain_values(values: Mapping[str, object], depth: int = 0) -> dict[str, object]:
    """A mapping with every value as by `plain`."""
    wrong = next((key for key in values if not isinstance(key, str)), None)
    if wrong is not None:
        said = f"the keys of a mapping must be texts, not {type(wrong).__name__} ({in_a_line(wrong)})"
        raise ConfigError([Problem("", "", said)])
    return {str(key): plain(item, depth + 1) for key, item in values.items()}


def make(
    cls: type[Section], build: Callable[..., Section], given: tuple[object, ...], values: Mapping[str, object]
) -> Section:
    """`cls(**values)` by `build`, with every mistake in one ConfigError: types, unknown keys, what is not supported; for a
    whole configuration the rules that tie keys together, too."""
    from .master import MasterConfig

    name = cls.__name__
    if given:
        kind = type(given[0]).__name__
        raise ConfigError([Problem(name, "", f"takes its keys as keywords ({name}(**mapping)), not a {kind}")])
    report = Report({}, "")
    data = fold_aliases(cls, plain_values(values), report)
    try:
        if report.problems:
            raise ConfigError(report.problems)
        made = build(**data)
        if not issubclass(cls, MasterConfig):
            check_marks(made, "", report)
        else:
            _check_whole(made, report)
    except ValidationError as failure:
        report.problems += mistakes(failure, cls)
    if report.problems:
        raise ConfigError([Problem(p.where or name, p.key, p.message) for p in report.problems])
    return made


def assign(section: Section, set_value: Callable[[str, object], None], name: str, value: object) -> None:
    """`section.name = value`, with the type checked as at construction."""
    if name not in type(section).model_fields and section.model_config.get("extra") != "allow":
        from .messages import unknown_key

        raise ConfigError([Problem(type(section).__name__, name, unknown_key(name, type(section)))])
    try:
        set_value(name, plain(value))
    except ValidationError as failure:
        raise ConfigError(
            [Problem(type(section).__name__, p.key, p.message) for p in mistakes(failure, type(section))]
        ) from None


def mistakes(failure: ValidationError, cls: type[Section]) -> list[Problem]:
    """What pydantic found, in sentences."""
    from .messages import dotted_key, sentence

    found = []
    for error in failure.errors(include_url=False):
        key = dotted_key(error["loc"])
        text = " ".join(sentence(error, key, cls).split())
        found.append(Problem("", key, text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."))
    return found


def checked(config: object, model: type[Master]) -> Master:
    """`config` as a `model` that passed all checks of the loader, whoever made it and whatever was assigned since.

    A mapping (also of pydantic's models of another package) is made one. Raises ConfigError, a ValueError.
    """
    if isinstance(config, model):
        report = Report({}, "")
        try:
            model.model_validate(config.model_dump(warnings=False))
        except ValidationError as failure:
            report.problems += mistakes(failure, model)
        if not report.problems:
            _check_whole(config, report)
        if report.problems:
            raise ConfigError(report.problems)
        return config
    if isinstance(config, BaseModel):
        config = config.model_dump(by_alias=True)
    if isinstance(config, Mapping):
        return model(**plain_values(config))
    raise ConfigError(
        [Problem("", "", f"the configuration must be a {model.__name__} or a mapping, not {type(config).__name__}")]
    )


def _check_whole(config: WholeConfig, report: Report) -> None:
    from . import rules
    from .env import environment_sections

    for name, section in environment_sections().items():
        if isinstance(config.env.get(name), dict):
            try:
                section.model_validate(config.env[name])
            except ValidationError as failure:
                report.problems += [Problem("", f"env.{name}.{p.key}", p.message) for p in mistakes(failure, section)]
    config.fill_defaults()
    check_marks(config, "", report)
    rules.check(config, report)


def check_marks(section: Section, prefix: str, report: Report) -> None:
    """Keys of unsupported features must be at the value that switches the feature off."""
    from .base import Section
    from .keys import mark_of
    from .messages import shown

    if section.is_switched and not section.enabled:
        return
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        key = prefix + (info.alias or name)
        mark = mark_of(info)
        if "only" in mark and not any(type(value) is type(ok) and value == ok for ok in mark["only"]):
            allowed = " or ".join(shown(ok) for ok in mark["only"])
            report.add(key, f"cannot be {shown(value)}: {mark['why']}; set it to {allowed}")
        if isinstance(value, Section):
            check_marks(value, f"{key}.", report)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Section):
                    check_marks(item, f"{key}.{i}.", report)


def fold_aliases(cls: type[Section], data: dict[str, object], report: Report) -> dict[str, object]:
    """Keys by the guides' other names, as `aliases.ALIASES` lists them, under the schema's names."""
    for spelling, canonical in aliases_of(cls):
        parent, name = walk(data, spelling)
        if parent is None or name not in parent:
            continue
        target, short = walk(data, canonical, make_sections=True)
        if target is None:
            continue
        value = parent.pop(name)
        if short in target and in_a_line(target[short], 10**4) != in_a_line(value, 10**4):
            report.add(
                spelling,
                f"and {canonical} are one key with two values: {in_a_line(value)} and {in_a_line(target[short])}; give one",
            )
        target[short] = value
    return data


def walk(data: dict[str, object], dotted: str, make_sections: bool = False) -> tuple[dict[str, object] | None, str]:
    """The mapping that holds (or would hold) the key, and its last part."""
    *sections, name = dotted.split(".")
    node: object = data
    for part in sections:
        if make_sections and isinstance(node, dict):
            node.setdefault(part, {})
        node = node.get(part) if isinstance(node, dict) else None
    return (node if isinstance(node, dict) else None), name


@cache
def aliases_of(cls: type[Section]) -> tuple[tuple[str, str], ...]:
    """(spelling, canonical) of the keys in a section of this class, wherever it stands in a whole configuration."""
    from .aliases import ALIASES
    from .keys import fields_of, section_type
    from .master import EvalMasterConfig, GRPOMasterConfig, MasterConfig, PPOMasterConfig

    found: dict[str, str] = {}

    def look(section: type[Section], prefix: str) -> None:
        if cls is section or (issubclass(section, cls) and not issubclass(cls, MasterConfig)):
            found.update(
                (spelling.removeprefix(prefix), canonical.removeprefix(prefix))
                for spelling, canonical in ALIASES
                if spelling.startswith(prefix) and canonical.startswith(prefix)
            )
        for name, info in fields_of(section):
            if (inner := section_type(info.annotation)) is not None:
                look(inner, f"{prefix}{name}.")

    for master in (GRPOMasterConfig, PPOMasterConfig, EvalMasterConfig):
        look(master, "")
    if issubclass(cls, MasterConfig):  # another run's section may have the same keys
        found = {
            spelling: canonical
            for spelling, canonical in found.items()
            if spelling.partition(".")[0] in cls.model_fields
        }
    return tuple(found.items())
