"""NeMo RL's configuration functions on dictionaries that are also read by attribute.

Scripts that call `load_config`, then `parse_hydra_overrides`, then resolve, work as before; the typed, checked way is
`nemo_rl_cpp.config.load_grpo_config`. No torch, no OmegaConf.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_cpp import _config
from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.config.locate import parent_folders
from nemo_rl_cpp.config.python_values import plain


class OverridesError(Exception):
    """Overrides that cannot be parsed or applied; the message lists every one."""


class ConfigDict(dict[str, Any]):
    """A dictionary that is also read and written as `config.grpo.seed`, at every depth.

    Read by attribute, an interpolation gives its value; as an item, its text.
    """

    def __init__(
        self, content: dict[str, Any], _root: ConfigDict | None = None, _path: tuple[str | int, ...] = ()
    ) -> None:
        root = self if _root is None else _root
        object.__setattr__(self, "_place", (root, _path))
        super().__init__({key: _with_attributes(value, root, (*_path, key)) for key, value in content.items()})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(
                f"the configuration has no key {name!r} here; known: {', '.join(map(str, self)) or 'none'}"
            )
        value = self[name]
        if not (isinstance(value, str) and "${" in value):
            return value
        root, path = self._place
        found: Any = resolve_config(root)
        for key in (*path, name):
            found = found[key]
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        root, path = self._place
        self[name] = _with_attributes(value, root, (*path, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigDict, (_plain(self),)


def _with_attributes(value: Any, root: ConfigDict, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, dict):
        return ConfigDict(value, root, path)
    if isinstance(value, list):
        return [_with_attributes(item, root, (*path, index)) for index, item in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _tree(config: Any, name: str = "cfg") -> dict[str, Any]:
    """The plain tree of a dictionary, of another mapping, or of OmegaConf's (its interpolations stay text)."""
    omegaconf = sys.modules.get("omegaconf")  # loaded wherever one of its objects exists
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        config = omegaconf.OmegaConf.to_container(config, resolve=False)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{name} must be a mapping (a dictionary, or OmegaConf's), not {type(config).__name__} ({in_a_line(config)})"
        )
    tree = plain(config)
    if too_large := next(_beyond_64_bits(tree, ""), None):
        raise ValueError(f"{name}: {too_large} is an integer of more than 64 bits")
    return tree


def _beyond_64_bits(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield key
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from _beyond_64_bits(item, f"{key}.{name}" if key else str(name))


def resolve_path(base_path: Path, path: str) -> Path:
    """`path` if it is absolute, else below `base_path`."""
    return Path(path) if path.startswith("/") else Path(base_path) / path


def merge_with_override(base_config: dict[str, Any], override_config: dict[str, Any]) -> ConfigDict:
    """`override_config` laid over `base_config`: dictionaries merge, everything else replaces.

    A top-level section with `_override_: true` replaces the base's whole section. Neither argument is changed.
    """
    return ConfigDict(_config.merge(_tree(base_config, "base_config"), _tree(override_config, "override_config")))


def load_config_with_inheritance(
    config_path: str | os.PathLike[str], base_dir: str | os.PathLike[str] | None = None
) -> ConfigDict:
    """A YAML file with its `defaults:` parents merged, interpolations left as text.

    `base_dir` is where the file's own parents are looked for; by default the file's folder.
    Raises FileNotFoundError (a file or parent is missing), RecursionError (parents form a circle), AssertionError (the file
    holds no mapping) or ValueError (malformed YAML, a duplicate key), each naming file and line.
    """
    try:
        return ConfigDict(
            _config.load_file(os.fspath(config_path), "" if base_dir is None else os.fspath(base_dir), parent_folders())
        )
    except _config.LoadError as error:
        kinds = {"missing_file": FileNotFoundError, "cycle": RecursionError, "root": AssertionError}
        raise kinds.get(error.kind, ValueError)(str(error)) from None


def load_config(config_path: str | os.PathLike[str]) -> ConfigDict:
    """As `load_config_with_inheritance`."""
    return load_config_with_inheritance(config_path)


def parse_hydra_overrides(cfg: dict[str, Any], overrides: list[str]) -> ConfigDict:
    """`cfg`, also one of OmegaConf's, with overrides applied (a.b=v, +a.b=v, ++a.b=v, ~a.b); the argument is not changed.

    Raises OverridesError that lists every override that cannot be parsed or applied.
    """
    texts = [overrides] if isinstance(overrides, str) else list(overrides)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise OverridesError(
            f"Failed to parse Hydra overrides: an override is a text such as 'grpo.seed=1', not {in_a_line(wrong)}"
        )
    config, problems = _config.apply_overrides(_tree(cfg), texts)
    if problems:
        lines = "\n".join(f"{where}: {key} {message}".replace(":  ", ": ") for _, key, where, message in problems)
        raise OverridesError(f"Failed to parse Hydra overrides: {lines}")
    return ConfigDict(config)


def resolve_config(cfg: dict[str, Any]) -> dict[str, Any]:
    """`cfg` with every ${...} replaced by its value, as OmegaConf.to_container(cfg, resolve=True). ValueError lists failures."""
    config, problems = _config.resolve(_tree(cfg))
    if problems:
        raise ValueError("\n".join(f"{key}: {message}" for _, key, _, message in problems))
    return config


def register_omegaconf_resolvers() -> None:
    """Registers add, sub, mul, div and max with OmegaConf where that package is in use; our own loader has them built in."""
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return
    functions = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "max": max,
    }
    for name, function in functions.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
