"""Loss and estimator classes accept their settings as a pydantic model, a dataclass, any object or a mapping."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


class ConfigModel(BaseModel):
    """Settings read and written as `config.key` or, as in scripts that hold plain dictionaries, `config["key"]`."""

    def __getitem__(self, key: str) -> Any:
        if key in self:
            return getattr(self, key)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or key in (self.model_extra or {})

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` when there is no such key."""
        return getattr(self, key) if key in self else default


def as_model(config: Any, model: type[M]) -> M:
    """`config` as `model`; fields it does not have keep their defaults."""
    if isinstance(config, model):
        return config
    if isinstance(config, Mapping):
        return model(**config)
    return model(**{name: getattr(config, name) for name in model.model_fields if hasattr(config, name)})


def setting(config: Any, name: str, *default: Any) -> Any:
    """One field of a mapping or an object; without a default a missing one is a MissingSetting that names it."""
    found = config.get(name, _MISSING) if isinstance(config, Mapping) else getattr(config, name, _MISSING)
    if found is not _MISSING:
        return found
    if default:
        return default[0]
    raise MissingSetting(f"the configuration has no '{name}'; add the key (known: {sorted(_names(config))})")


class MissingSetting(ValueError, KeyError):
    """A key that has no default is absent; also a KeyError, which is what NeMo RL raises here."""

    __str__ = ValueError.__str__


def _names(config: Any) -> list[str]:
    return list(config) if isinstance(config, Mapping) else [n for n in vars(config) if not n.startswith("_")]


_MISSING = object()
