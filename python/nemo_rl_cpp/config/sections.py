"""A section of the configuration from what a caller of a class has: the section, a mapping, a dataclass, any object."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from nemo_rl_cpp.argument_checks import in_a_line

from .base import Section
from .errors import ConfigError, Problem
from .keys import fields_of, section_type
from .messages import known_keys, takes_own_keys, unknown_key

M = TypeVar("M", bound=Section)


def as_model(config: object, model: type[M], section: str = "") -> M:
    """`config` as `model`; fields that it does not have keep their defaults, a name that `model` lacks is a ConfigError.

    `section` is where it stands in a file ("env.math"), for messages.
    """
    if isinstance(config, model):
        return config
    try:
        return model(**_values(config, model))
    except ConfigError as error:
        if not section:
            raise
        where = [Problem("", f"{section}.{p.key}" if p.key else section, p.message) for p in error.problems]
    raise ConfigError(where)


def read_section(config: object, model: type[M], **absent: object) -> M:
    """`config`, a section, a mapping or an object, as `model`, to be read by attribute; its values are the caller's to check.

    `absent`: what a key is that a mapping or an object leaves out, where that differs from the schema's default.
    """
    return config if isinstance(config, model) else model.model_construct(**absent | _values(config, model))


def check_keys(given: object, name: str, *models: type[Section]) -> None:
    """ConfigError for a key of a section made by hand that none of `models` has, with the nearest one.

    `given` is a mapping or an object; a section was checked when it was made, and None stands for one without keys. `name` is
    its place in a file ("policy.generation"), for messages.
    """
    if given is None or isinstance(given, Section):
        return
    known = frozenset().union(*(known_keys(model) for model in models))
    problems = []
    for key in _dotted_keys(_values(given, *models), models, ""):
        if key not in known and not any(takes_own_keys(key, model) for model in models):
            said = [unknown_key(key, model) for model in models]
            nearest = next((text for text in said if "did you mean" in text), said[0])
            where = Problem("", f"{name}.{key}", nearest) if name else Problem(models[0].__name__, key, nearest)
            problems.append(where)
    if problems:
        raise ConfigError(problems)


def _dotted_keys(given: object, models: Iterable[type[Section]], prefix: str) -> Iterator[str]:
    """Keys of a mapping, those in the sections that it holds as mappings included. What the program itself writes
    (`_pad_token_id`) is none of them."""
    if not isinstance(given, Mapping):
        return
    sections = {name: section_type(info.annotation) for model in models for name, info in fields_of(model)}
    for key, value in given.items():
        if any(key in (model.__private_attributes__ or ()) for model in models):
            continue
        yield f"{prefix}{key}"
        if (inner := sections.get(str(key))) is not None:
            yield from _dotted_keys(value, (inner,), f"{prefix}{key}.")


def _values(config: object, *models: type[Section]) -> dict[str, object]:
    """The settings in a mapping or an object; of an object's class only those that a model has."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, bytes, int, float, list, tuple, set, type(None))):
        names = " or ".join(model.__name__ for model in models)
        raise ConfigError(
            [Problem("", "", f"expected a {names} or a mapping, not {type(config).__name__} ({in_a_line(config)})")]
        )
    own = {**getattr(config, "__dict__", {}), **(getattr(config, "model_extra", None) or {})}
    of_class = {name: getattr(config, name) for model in models for name in model.model_fields if hasattr(config, name)}
    return of_class | {name: value for name, value in own.items() if not name.startswith("_")}
