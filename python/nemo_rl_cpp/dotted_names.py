"""Import objects by dotted name (`my_module.my_name`). A wrong name gives a one-sentence error. Needs no torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.errors import in_user_code, one_sentence

searched: list[str] = []  # the folders given to the last call of `search_for_modules`


class LoadingError(ValueError):
    """Raised if a dotted name cannot be imported or used."""


def search_for_modules(*folders: str | Path) -> None:
    """Make imports search `folders`, which are the working directory and the folder of the configuration file, after
    the installed packages."""
    searched[:] = dict.fromkeys(map(str, folders))
    for folder in searched:
        if folder not in sys.path and not ("" in sys.path and folder == str(Path.cwd())):
            sys.path.append(folder)


def is_dotted(name: object) -> bool:
    return isinstance(name, str) and "." in name and all(part.isidentifier() for part in name.split("."))


class PythonObjectRef(str):
    """The value of a configuration key whose component was passed as a Python object, not by its dotted name. It is a
    string: the component's name followed by "(given from Python)", never a valid dotted name. `component` is the
    object. Other processes receive only the string."""

    component: object

    def __new__(cls, name: str, component: object) -> PythonObjectRef:
        made = super().__new__(cls, f"{name} (given from Python)")
        made.component = component
        return made

    def __deepcopy__(self, memo: object) -> PythonObjectRef:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def is_user_defined(name: object) -> bool:
    """Return whether a configuration value refers to a custom component: by a dotted name, or as a Python object."""
    return isinstance(name, PythonObjectRef) or is_dotted(name)


def import_object(name: str, what: str) -> Any:
    """Import and return the object with a dotted name (`module.name`, `package.module.Class.method`). If that fails,
    raise LoadingError, whose message starts with `what`, such as "reward function"."""
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise LoadingError(f"{what} {in_a_line(name)} is no dotted name: write module.name, as in my_module.my_name")
    found, attributes = _import_module(parts, name, what)
    for attribute in attributes:
        owner = found
        try:
            found = getattr(owner, attribute)
        except AttributeError:
            raise LoadingError(_no_attribute(name, what, owner, attribute)) from None
    return found


def _import_module(parts: list[str], name: str, what: str) -> tuple[ModuleType, list[str]]:
    """Import the longest prefix of the dotted name `name` that is a module; `parts` are its words. Return the module
    and the remaining parts. If that fails, raise LoadingError, whose message starts with `what`, such as "loss"."""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            return importlib.import_module(module), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                continue  # not a module, but perhaps an attribute of the module with the shorter prefix
            raise LoadingError(f"{what} {in_a_line(name)} cannot be imported: {one_sentence(error)}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit: a module must not end the program
            told = in_user_code(error, f"importing {module}")
            why = told or _syntax(error) or one_sentence(error)
            raise LoadingError(f"{what} {in_a_line(name)} cannot be imported: {why}") from error
    folders = ", ".join(dict.fromkeys(["the working directory", *searched[1:]])) if searched else "sys.path"
    beside = sorted({path.stem for folder in [*searched, "."] for path in Path(folder).glob("*.py")})
    near = did_you_mean(parts[0], beside)
    hint = f"; {near}" if near else f": put {parts[0]}.py into the working directory, or set PYTHONPATH"
    why = f"there is no module {parts[0]} (looked in {folders} and the installed packages){hint}"
    raise LoadingError(f"{what} {in_a_line(name)} cannot be imported: {why}")


def _syntax(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return None


def _no_attribute(name: str, what: str, owner: object, attribute: str) -> str:
    module = getattr(owner, "__name__", str(owner))
    names = [own for own in vars(owner) if not own.startswith("_")] if hasattr(owner, "__dict__") else []
    own = [n for n in names if getattr(getattr(owner, n), "__module__", None) == module] or names
    hint = did_you_mean(attribute, names, f"it has {', '.join(own[:10]) or 'nothing'}")
    return f"{what} {in_a_line(name)}: {module} has no {attribute}; {hint}"
