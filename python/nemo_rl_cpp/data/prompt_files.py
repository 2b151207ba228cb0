"""Finds prompt, system-prompt and template files, whether the program runs from the source tree or from a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


class MissingFileError(FileNotFoundError, ValueError):
    """A file that a configuration names is not there: a user's mistake as well as an error of the system."""


def find_file(path: str | Path, key: str) -> Path:
    """The file that a configuration means: as given, then in the source tree, then in the installed package.

    The package carries the prompts of `examples/prompts/`; they are found there by that path or by their name.
    Raises MissingFileError (a FileNotFoundError and a ValueError) that names `key` and every place that was tried.
    """
    given = Path(path).expanduser()
    candidates = [given]
    if not given.is_absolute():
        source_tree = _PACKAGE.parents[1]
        if (source_tree / "pyproject.toml").is_file():
            candidates.append(source_tree / given)
        candidates.append(_PACKAGE / given)
        # Another folder's missing file must not turn into a prompt that happens to have its name.
        if str(given.parent) in (".", "prompts", "examples/prompts"):
            candidates.append(_PACKAGE / "prompts" / given.name)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise MissingFileError(f"{key}: the file {str(path)!r} was not found (tried {tried})")
