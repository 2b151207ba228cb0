"""Environments, reward functions and other objects of a configuration by their dotted names, with what is wrong about them in
one sentence. Nothing here needs torch; the user's own module may."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.config.env import ENV_REGISTRY, EnvironmentEntry
from nemo_rl_cpp.errors import in_user_code, one_sentence

if TYPE_CHECKING:
    from nemo_rl_cpp.data.datasets import RawDataset
    from nemo_rl_cpp.environments.interfaces import EnvironmentInterface

INTERFACE = "nemo_rl_cpp.environments.interfaces.EnvironmentInterface"
DATASET_BASE = "nemo_rl_cpp.data.datasets.RawDataset"

_searched: list[str] = []  # folders that `search_for_modules` was given last


class LoadingError(ValueError):
    """A name that leads to nothing, or to something that cannot be used; the message is one sentence."""


def search_for_modules(*folders: Path) -> None:
    """Lets the user's modules be found in these folders (the working folder, that of the configuration), after all others."""
    _searched[:] = dict.fromkeys(map(str, folders))
    for folder in _searched:
        if folder not in sys.path and not ("" in sys.path and folder == str(Path.cwd())):
            sys.path.append(folder)


def import_object(name: str, what: str) -> Any:
    """The object of a dotted name (`module.name`, also `package.module.Class.method`). `what` begins the sentence of a
    LoadingError: "reward function", for instance."""
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
    """The longest beginning of the name that is a module, imported, and what is left of the name."""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            return importlib.import_module(module), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                continue  # it is no module; perhaps what stands before it is one that has it
            raise LoadingError(f"{what} {in_a_line(name)} cannot be imported: {one_sentence(error)}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: nothing in a module may end the program
            told = in_user_code(error, f"importing {module}")
            raise LoadingError(
                f"{what} {in_a_line(name)} cannot be imported: {told or _syntax(error) or one_sentence(error)}"
            ) from error
    folders = ", ".join(dict.fromkeys(["the working folder", *_searched[1:]])) if _searched else "sys.path"
    near = difflib.get_close_matches(parts[0], _modules_beside(), 1, 0.6)
    hint = f"; did you mean {near[0]}?" if near else f": put {parts[0]}.py into the working folder, or set PYTHONPATH"
    raise LoadingError(
        f"{what} {in_a_line(name)} cannot be imported: there is no module {parts[0]} (looked in {folders} and the installed packages){hint}"
    )


def _modules_beside() -> list[str]:
    return sorted({path.stem for folder in [*_searched, "."] for path in Path(folder).glob("*.py")})


def _syntax(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return None


def _no_attribute(name: str, what: str, owner: object, attribute: str) -> str:
    module = getattr(owner, "__name__", str(owner))
    names = [own for own in vars(owner) if not own.startswith("_")] if hasattr(owner, "__dict__") else []
    own = [n for n in names if getattr(getattr(owner, n), "__module__", None) == module] or names
    near = difflib.get_close_matches(attribute, names, 1, 0.6)
    hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(own[:10]) or 'nothing'}"
    return f"{what} {in_a_line(name)}: {module} has no {attribute}{hint}"


def environment_target(name: str, registry: Mapping[str, EnvironmentEntry] = ENV_REGISTRY) -> str:
    """The dotted name of the class that an environment's name stands for; LoadingError for a name of nothing."""
    if name in registry:
        return registry[name]["actor_class_fqn"]
    if "." not in name:
        near = difflib.get_close_matches(name, registry, 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise LoadingError(
            f"no environment is called {name!r}{hint} (known: {', '.join(sorted(registry))}; register_env or a dotted class name adds one)"
        )
    return name


def environment_class(name: str, registry: Mapping[str, EnvironmentEntry] = ENV_REGISTRY) -> type[EnvironmentInterface]:
    """The class of a registered name or of a dotted one, imported, with the interface that rollouts need."""
    found = import_object(environment_target(name, registry), "environment")
    check_environment_class(found, name)
    return found


def check_environment_class(found: object, name: str) -> None:
    """LoadingError for what is no environment: `Class.remote`, `step` and `global_post_process_and_metrics` are needed."""
    if not callable(getattr(found, "remote", None)):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise LoadingError(
            f"environment {name!r} is {kind}, without the interface of environments: derive the class from {INTERFACE}"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise LoadingError(f"environment {name!r} lacks {' and '.join(missing)}, which {INTERFACE} asks for")
    if inspect.isclass(found) and found.remote.__qualname__ == "Remotable.remote" and not _takes(found, {}):
        raise LoadingError(
            f"environment {name!r} takes {inspect.signature(found)}: its __init__ must take (self, cfg), where cfg is its section of env"
        )
    step = getattr(found, "step", None)
    if step is not None and inspect.isfunction(step):
        if not _takes(step, None, [], []):
            raise LoadingError(
                f"environment {name!r}: step{inspect.signature(step)} must take (self, message_log_batch, metadata)"
            )


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a call with these arguments fits the signature; True where there is none to be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def own_dataset_class(name: str) -> type[RawDataset]:
    """The user's data set class of a dotted name, with what a run asks of it; LoadingError for one that lacks it."""
    found = import_object(name, "data set class")
    lacking = [method for method in ("set_task_spec", "set_processor") if not callable(getattr(found, method, None))]
    if not callable(found) or lacking:
        raise LoadingError(
            f"data set class {name!r} lacks {' and '.join(lacking) or 'a constructor'}: derive it from {DATASET_BASE}"
        )
    return found


def reward_function(name: object) -> Callable[..., Sequence[float | None]]:
    """A reward function of a dotted name, or the function itself; LoadingError for what cannot be called."""
    found = import_object(name, "reward function") if isinstance(name, str) else name
    if not callable(found):
        raise LoadingError(
            f"reward function {in_a_line(name)} is of type {type(found).__name__}, which cannot be called: give a function"
        )
    return found


def check_reward_section(section: Mapping[str, object]) -> None:
    """LoadingError for a section env.reward_functions whose functions cannot be used."""
    unknown = sorted(set(section) - {"functions", "weights"})
    if unknown or "functions" not in section:
        raise LoadingError(
            f"it takes functions (dotted names) and weights, but has {', '.join(sorted(section)) or 'nothing'}"
        )
    functions, weights = section["functions"], section.get("weights")
    functions = [functions] if isinstance(functions, str) else functions
    if not isinstance(functions, list) or not functions:
        raise LoadingError(
            f"functions is {section['functions']!r}: expected a list of dotted names, as [my_rewards.right]"
        )
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(functions)):
        raise LoadingError(
            f"functions has {len(functions)} names and weights is {weights!r}: one number a function is expected"
        )
    for name in functions:
        reward_function(name)


def needed_package(name: str) -> str | None:
    """The package that an environment of ours needs and that is not installed."""
    package = {"reasoning_gym": "reasoning_gym"}.get(name)
    return package if package is not None and importlib.util.find_spec(package) is None else None
