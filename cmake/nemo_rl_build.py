"""The build backend: scikit-build-core's, in an environment of its own where the present one lacks what a build needs.

`uv sync` builds with the environment that it has just filled ([tool.uv] no-build-isolation-package), so that a changed file is
compiled alone. By the same setting `uv build` in a fresh clone, where there is no environment yet, asks this backend with a bare
Python: then the build's requirements ([build-system] requires) go into a temporary environment, as isolation would have it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Settings = dict[str, "str | list[str]"] | None
_CALL = """
import json, sys
import scikit_build_core.build as backend
hook, arguments, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
given = getattr(backend, hook)(*arguments)
with open(answer, "w", encoding="utf-8") as file:
    json.dump(given, file)
"""


def _call(hook: str, *arguments: object, needs: Sequence[str]) -> object:
    """The answer of scikit-build-core's `hook`; `needs`: modules that the present environment must have for it."""
    if all(importlib.util.find_spec(name) is not None for name in needs):
        return getattr(importlib.import_module("scikit_build_core.build"), hook)(*arguments)
    with tempfile.TemporaryDirectory(prefix="nemo_rl_build_") as folder:
        python = _environment(Path(folder) / "environment", compiles="torch" in needs)
        return _run(python, hook, arguments, Path(folder))


def _run(python: Path, hook: str, arguments: Sequence[object], folder: Path) -> object:
    answer = folder / "answer.json"
    environment = os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "VIRTUAL_ENV": str(python.parent.parent),
    }
    environment.pop("PYTHONPATH", None)
    command = [str(python), "-c", _CALL, hook, json.dumps(arguments), str(answer)]
    if subprocess.run(command, env=environment).returncode != 0:
        raise SystemExit(f"{hook} failed: the reason is above")
    return json.loads(answer.read_text(encoding="utf-8"))


def _environment(folder: Path, compiles: bool) -> Path:
    """The Python of a new environment with the build's requirements; without those of the compilation where nothing is compiled."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        requires = tomllib.load(file)["build-system"]["requires"]
    if not compiles:
        requires = [line for line in requires if line.startswith("scikit-build-core")]
    python = folder / "bin" / "python"
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is not None:
        make = [uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--quiet", "--no-config", "--python", str(python)]
    else:
        make = [sys.executable, "-m", "venv", str(folder)]
        install = [str(python), "-m", "pip", "install", "--quiet"]
    print(f"building in an environment of its own: {', '.join(requires)}", file=sys.stderr, flush=True)
    subprocess.run(make, check=True)
    subprocess.run([*install, *requires], check=True)
    if compiles:
        with tempfile.TemporaryDirectory() as scratch:
            more = _run(python, "get_requires_for_build_wheel", [None], Path(scratch))
        if more:
            subprocess.run([*install, *more], check=True)
    return python


_SOURCES, _COMPILES = ("scikit_build_core",), ("scikit_build_core", "torch")


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> object:
    return _call("build_wheel", wheel_directory, config_settings, metadata_directory, needs=_COMPILES)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> object:
    return _call("build_editable", wheel_directory, config_settings, metadata_directory, needs=_COMPILES)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> object:
    return _call("build_sdist", sdist_directory, config_settings, needs=_SOURCES)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> object:
    return _call("prepare_metadata_for_build_wheel", metadata_directory, config_settings, needs=_SOURCES)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> object:
    return _call("prepare_metadata_for_build_editable", metadata_directory, config_settings, needs=_SOURCES)


def get_requires_for_build_wheel(config_settings: Settings = None) -> object:
    return _call("get_requires_for_build_wheel", config_settings, needs=_SOURCES)


def get_requires_for_build_editable(config_settings: Settings = None) -> object:
    return _call("get_requires_for_build_editable", config_settings, needs=_SOURCES)


def get_requires_for_build_sdist(config_settings: Settings = None) -> object:
    return _call("get_requires_for_build_sdist", config_settings, needs=_SOURCES)
