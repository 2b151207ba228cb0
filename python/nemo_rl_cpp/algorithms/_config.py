"""Loss and estimator classes accept their settings as a pydantic model, a dataclass, any object or a mapping."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def as_model(config: Any, model: type[M]) -> M:
    """`config` as `model`; fields it does not have keep their defaults."""
    if isinstance(config, model):
        return config
    if isinstance(config, Mapping):
        return model(**config)
    return model(**{name: getattr(config, name) for name in model.model_fields if hasattr(config, name)})


def setting(config: Any, name: str, *default: Any) -> Any:
    """One field of a mapping or an object; without a default a missing one is a ValueError that names it."""
    found = config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
    if found is not _MISSING:
        return found
    if default:
        return default[0]
    raise ValueError(f"the configuration has no '{name}'; add the key (known: {sorted(_names(config))})")


def _names(config: Any) -> list[str]:
    return list(config) if isinstance(config, Mapping) else [n for n in vars(config) if not n.startswith("_")]


_MISSING = object()
