"""Finds prompt, system-prompt and template files, whether the program runs from the source tree or from a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


class MissingFileError(FileNotFoundError, ValueError):
    """A file that a configuration names is not there: a user's mistake as well as an error of the system."""


def _places(path: str | Path) -> list[Path]:
    """List where a file may be: as given, then in the source tree, then in the installed package, which carries the prompts of
    `examples/prompts/`; they are found there by that path or by their name."""
    given = Path(path).expanduser()
    if given.is_absolute():
        return [given]
    source_tree = _PACKAGE.parents[1]
    places = [given, *([source_tree / given] if (source_tree / "pyproject.toml").is_file() else []), _PACKAGE / given]
    # Another folder's missing file must not turn into a prompt that happens to have its name.
    in_package = str(given.parent) in (".", "prompts", "examples/prompts")
    return [*places, _PACKAGE / "prompts" / given.name] if in_package else places


def find_prompt(path: str | Path) -> Path | None:
    """Return the file that a configuration means; None if there is none."""
    return next((place for place in _places(path) if place.is_file()), None)


def find_file(path: str | Path, key: str) -> Path:
    """Return the file that a configuration means.

    Raises MissingFileError (a FileNotFoundError and a ValueError) that names `key` and every place that was tried.
    """
    if (found := find_prompt(path)) is not None:
        return found
    tried = ", ".join(map(str, _places(path)))
    raise MissingFileError(f"{key}: the file {str(path)!r} was not found (tried {tried})")
