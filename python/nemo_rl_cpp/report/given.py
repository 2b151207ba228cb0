"""What the user of a run set: keys of the command line, of a call and of files of their own, with what they replaced."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from nemo_rl_cpp.config.access import to_plain, written
from nemo_rl_cpp.config.errors import ConfigError
from nemo_rl_cpp.config.loader import LOADERS, kind_of
from nemo_rl_cpp.config.locate import config_folders, find_config
from nemo_rl_cpp.config.master import MasterConfig
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import flatten_dict


def schema_defaults(config: object) -> dict[str, object]:
    """The defaults of a pydantic configuration as plain data; mandatory keys are absent.

    Values that nobody wrote but that follow from others (`config.positions` knows who wrote what) count as defaults. An
    object that is no pydantic model has none: an empty dict.
    """
    if not isinstance(config, BaseModel):
        return {}
    defaults = _defaults(config)
    positions = getattr(config, "positions", None)
    if positions:
        for key, value in flatten_dict(written(config), expand_lists=False).items():
            if not written_by(key, positions):
                _put(defaults, key.split("."), value)
    return defaults


def written_by(key: str, positions: Collection[str]) -> list[str]:
    """The keys by whose lines somebody wrote this one: itself, those below it, or the whole value that it is a part of."""
    if key in positions:
        return [key]
    if below := _below(key, positions):
        return below
    parts = key.split(".")
    whole = next((a for n in range(len(parts) - 1, 0, -1) if (a := ".".join(parts[:n])) in positions), None)
    return [] if whole is None or _below(whole, positions) else [whole]


def _below(key: str, positions: Collection[str]) -> list[str]:
    return [other for other in positions if other.startswith((f"{key}.", f"{key}["))]


def _defaults(model: BaseModel) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name, None)
        if isinstance(value, BaseModel):
            # the section that is in use, so that a union of kinds is compared with the defaults of its own kind
            values[info.alias or name] = _defaults(value)
        elif not info.is_required():
            values[info.alias or name] = to_plain(info.get_default(call_default_factory=True))
    return values


def _put(tree: dict[str, object], path: list[str], value: object) -> None:
    for part in path[:-1]:
        branch = tree.get(part)
        if not isinstance(branch, dict):
            branch = tree[part] = {}
        tree = branch
    tree[path[-1]] = value


class GivenKey(NamedTuple):
    """A key, its value, the value that it replaced (None where there was none), and where it was set."""

    key: str
    value: Plain
    before: Plain
    where: str


class Given(NamedTuple):
    """What was set, and the shipped file that it was set on top of ("" where there is none)."""

    keys: list[GivenKey]
    base: str


def given_keys(config: object, defaults: Mapping[str, object]) -> Given | None:
    """What the user set, without what repeats the shipped file or, where there is none, the schema's `defaults`. None for an
    object that no file was loaded into: nobody knows what was set."""
    if not isinstance(config, MasterConfig) or not config.positions:
        return None
    own = {key: place for key, where in config.positions.items() if (place := _own_place(where)) is not None}
    base = _base_file(config)
    before = _flat_base(base) if base else flatten_dict(defaults, expand_lists=False)
    keys = [
        GivenKey(key, value, before.get(key), place)
        for key, value in flatten_dict(written(config), expand_lists=False).items()
        if (place := next((own[by] for by in written_by(key, config.positions) if by in own), None)) is not None
        and before.get(key) != value
    ]
    return Given(keys, base)


def _own_place(where: str) -> str | None:
    """How a reader names a place; None for a line of a shipped file."""
    if where.startswith("override "):
        return "command line"
    file, _, number = where.rpartition(":")
    if not number.isdigit():
        return where
    return None if _shipped_name(file) is not None else f"{Path(file).name}:{number}"


def _shipped_name(file: str) -> str | None:
    path = Path(file).resolve()
    for folder in config_folders():
        if path.is_relative_to(folder.resolve()):
            return str(path.relative_to(folder.resolve()))
    return None


def _base_file(config: MasterConfig) -> str:
    """The shipped file with the longest chain of parents among those that a configuration comes from."""
    files = {where.rpartition(":")[0] for where in config.positions.values() if not where.startswith("override ")}
    names = {name for file in files if (name := _shipped_name(file)) is not None}
    return max(sorted(names), key=_chain_length, default="")


def _chain_length(name: str) -> int:
    try:
        file = find_config(name)
    except ConfigError:
        return 0
    parents = re.findall(r"^defaults:\s*(\S+\.ya?ml)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return 1 + max((_chain_length(parent) for parent in parents if parent != name), default=0)


def _flat_base(name: str) -> dict[str, object]:
    try:
        return flatten_dict(written(LOADERS[kind_of(name)](name)), expand_lists=False)
    except (ConfigError, OSError):
        return {}  # it needs a variable of the environment, for example
