"""Loss and estimator classes accept their settings as a section of the configuration, a dataclass, any object or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from nemo_rl_cpp.config.sections import as_model, check_keys

T = TypeVar("T")
__all__ = ["MissingSetting", "as_model", "check_keys", "setting"]


def setting(config: object, name: str, *default: T) -> T:
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


def _names(config: object) -> list[str]:
    return list(config) if isinstance(config, Mapping) else [n for n in vars(config) if not n.startswith("_")]


_MISSING = object()
