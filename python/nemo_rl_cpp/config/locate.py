"""Finds configuration and prompt files: as given, in the source tree, or in the installed package."""

import difflib
import os
from pathlib import Path

from .errors import ConfigError, Problem

PACKAGE = Path(__file__).resolve().parents[1]
_RENAMED = {"grpo.yaml": "grpo_math_1B.yaml", "ppo.yaml": "ppo_math_1B_megatron.yaml"}


def source_tree() -> Path | None:
    """Return the checkout that contains this package, or None for an installed wheel."""
    root = PACKAGE.parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "configs").is_dir() else None


def config_folders() -> list[Path]:
    """Return the folders of shipped configurations; a checkout's folder comes before the package's."""
    root = source_tree()
    return ([root / "configs"] if root else []) + [PACKAGE / "configs"]


def parent_folders() -> list[str]:
    """Return the folders in which `defaults:` finds a parent by `grpo_tiny.yaml` or `configs/grpo_tiny.yaml`."""
    return [os.fspath(place) for folder in config_folders() for place in (folder, folder.parent)]


def find_config(path: str | os.PathLike[str]) -> Path:
    """Return the YAML file for `path`.

    An existing file comes first. Otherwise the path is looked up below the shipped `configs/`: a leading
    `examples/configs/` or `configs/` is dropped, `grpo.yaml` stands for `grpo_math_1B.yaml`, and NeMo RL's
    `NAME.v2.yaml` for `NAME.yaml`. Raise ConfigError with the closest names if there is no such file.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return given
    relative = given
    for prefix in ("examples/configs", "configs"):
        if given.is_relative_to(prefix):
            relative = given.relative_to(prefix)
            break
    names = [relative, relative.with_name(_RENAMED.get(relative.name, relative.name.replace(".v2.yaml", ".yaml")))]
    if not given.is_absolute():
        for folder in config_folders():
            for name in names:
                if (folder / name).is_file():
                    return folder / name
    raise ConfigError([Problem("", "", _not_found(str(path), relative))])


def shipped_configs() -> list[str]:
    """Return the names of the shipped configurations, as --config accepts them."""
    return sorted(
        {str(p.relative_to(folder)) for folder in config_folders() if folder.is_dir() for p in folder.rglob("*.yaml")}
    )


def _not_found(given: str, relative: Path) -> str:
    known = shipped_configs()
    stems = {name.removesuffix(".yaml"): name for name in known}  # the common suffix would distort the comparison
    near = [stems[stem] for stem in difflib.get_close_matches(str(relative.with_suffix("")), list(stems), 3, 0.6)]
    near += [name for name in known if Path(name).name == relative.name and name not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped are {', '.join(known)}"
    return f"the configuration file {given} does not exist, neither here nor among the shipped ones; {hint}"
