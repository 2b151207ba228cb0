"""Environments, reward functions and data sets of a configuration by their dotted names, with what is wrong about them in one
sentence. Nothing here needs torch; the user's own module may."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.config.env import ENV_REGISTRY, EnvironmentEntry
from nemo_rl_cpp.dotted_names import LoadingError, import_object, takes
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface

if TYPE_CHECKING:
    from nemo_rl_cpp.data.datasets import RawDataset

INTERFACE = "nemo_rl_cpp.environments.interfaces.EnvironmentInterface"
DATASET_BASE = "nemo_rl_cpp.data.datasets.RawDataset"


def environment_target(name: str, registry: Mapping[str, EnvironmentEntry] = ENV_REGISTRY) -> str:
    """The dotted name of the class that an environment's name stands for; LoadingError for a name of nothing."""
    if name in registry:
        return registry[name]["actor_class_fqn"]
    if "." not in name:
        near = did_you_mean(name, registry)
        raise LoadingError(
            f"no environment is called {name!r}{near and f'; {near}'} (known: {', '.join(sorted(registry))}; register_env or a dotted class name adds one)"
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
    if inspect.isclass(found) and found.remote.__qualname__ == "Remotable.remote" and not takes(found, {}):
        raise LoadingError(
            f"environment {name!r} takes {inspect.signature(found)}: its __init__ must take (self, cfg), where cfg is its section of env"
        )
    step = getattr(found, "step", None)
    if step is not None and inspect.isfunction(step):
        if not takes(step, None, [], []):
            raise LoadingError(
                f"environment {name!r}: step{inspect.signature(step)} must take (self, message_log_batch, metadata)"
            )


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
    unknown = sorted(set(section) - {"functions", "weights", "names", "as_parts"})
    if unknown or "functions" not in section:
        raise LoadingError(
            f"it takes functions (dotted names), weights, names and as_parts, but has {', '.join(sorted(section)) or 'nothing'}"
        )
    functions, weights, names = section["functions"], section.get("weights"), section.get("names")
    functions = [functions] if isinstance(functions, str) else functions
    if not isinstance(functions, list) or not functions:
        raise LoadingError(
            f"functions is {section['functions']!r}: expected a list of dotted names, as [my_rewards.right]"
        )
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(functions)):
        raise LoadingError(
            f"functions has {len(functions)} names and weights is {weights!r}: one number a function is expected"
        )
    if names is not None and (not isinstance(names, list) or len(set(map(str, names))) != len(functions)):
        raise LoadingError(
            f"functions has {len(functions)} names and names is {names!r}: one of its own a function is expected"
        )
    for name in functions:
        reward_function(name)


def needed_package(name: str) -> str | None:
    """The package that an environment of ours needs and that is not installed."""
    package = {"reasoning_gym": "reasoning_gym"}.get(name)
    return package if package is not None and importlib.util.find_spec(package) is None else None
