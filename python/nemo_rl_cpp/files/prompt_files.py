"""Find prompt, system-prompt and template files, in a source tree or an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


class MissingFileError(FileNotFoundError, ValueError):
    """Raised if a file given in a configuration does not exist. It is both a FileNotFoundError and a ValueError."""


def _places(path: str | Path) -> list[Path]:
    """Return the places to try for the file `path`: as given, in the source tree, and in the installed package, which
    has the prompts of `examples/prompts/` by path or name. An absolute path is tried alone."""
    given = Path(path).expanduser()
    if given.is_absolute():
        return [given]
    source_tree = _PACKAGE.parents[1]
    places = [given, *([source_tree / given] if (source_tree / "pyproject.toml").is_file() else []), _PACKAGE / given]
    # a missing file of a different folder must not be replaced by a packaged prompt of the same name
    in_package = str(given.parent) in (".", "prompts", "examples/prompts")
    return [*places, _PACKAGE / "prompts" / given.name] if in_package else places


def find_file(path: str | Path, key: str) -> Path:
    """Return the file that a configuration names by `path`. If there is none, raise MissingFileError with the
    configuration key `key` and every place searched."""
    places = _places(path)
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(map(str, places))
    raise MissingFileError(f"{key} names the file {str(path)!r}, which was not found (tried {tried})")
