"""What the user of a run set: keys of the command line, of a call and of files of their own, with what they replaced."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import written
from nemo_rl_cpp.config.errors import ConfigError
from nemo_rl_cpp.config.loader import LOADERS, kind_of
from nemo_rl_cpp.config.locate import config_folders, find_config
from nemo_rl_cpp.config.master import MasterConfig
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.report.defaults import written_by


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
