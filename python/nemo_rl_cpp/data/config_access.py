"""Reads configuration sections that may be dictionaries or typed models."""

from collections.abc import Mapping
from typing import Any

_REQUIRED = object()


def is_given(config: object, key: str) -> bool:
    """Whether the user wrote the key: a default of a typed model does not count, an explicit null does."""
    if isinstance(config, Mapping):
        return key in config
    written = getattr(config, "model_fields_set", None)
    if written is not None:
        return key in written
    return hasattr(config, key)


def get_field(config: object, key: str, default: object = _REQUIRED) -> Any:
    """config[key] or config.key; ValueError naming the key when it is missing and has no default."""
    if config is not None:
        if isinstance(config, Mapping):
            if key in config:
                return config[key]
        elif hasattr(config, key):
            return getattr(config, key)
    if default is _REQUIRED:
        raise ValueError(f"the configuration section lacks the key {key!r}")
    return default


def to_plain(config: object) -> Any:
    """Dictionaries and lists all the way down, with only the keys that were written; the original stays as it is."""
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(value) for value in config]
    if hasattr(config, "model_dump"):
        return to_plain(config.model_dump(exclude_unset=True, by_alias=False))
    return config
