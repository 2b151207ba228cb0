"""The lookup of environments and reward functions by name, and the collection of a run's environments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from nemo_rl_cpp.argument_checks import LARGEST, did_you_mean, in_a_line, is_iterable, number
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.dotted_names import LoadingError, import_object
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentInterface
from nemo_rl_cpp.environments.remote import ActorSettings, Remotable, ray_environment, shut_down
from nemo_rl_cpp.errors import user_code
from nemo_rl_cpp.user_code import serve

INTERFACE = "nemo_rl_cpp.environments.interfaces.EnvironmentInterface"
RewardFunction = Callable[..., Sequence[float | None]]
_KEYS = {"functions", "weights", "names", "as_parts"}


def environment_target(name: str) -> str:
    """Return the dotted name of the class of the environment `name`. Raise LoadingError for an unknown name."""
    if name in ENV_REGISTRY:
        return ENV_REGISTRY[name]["actor_class_fqn"]
    if "." not in name:
        near = did_you_mean(name, ENV_REGISTRY)
        raise LoadingError(
            f"no environment is called {name!r}{near and f'; {near}'} (known: {', '.join(sorted(ENV_REGISTRY))}; register_env or a dotted class name adds one)"
        )
    return name


def environment_class(name: str) -> type[EnvironmentInterface]:
    """Return the environment class with a registered or dotted name. Raise LoadingError if it lacks a method."""
    found = import_object(environment_target(name), "environment")
    if not callable(getattr(found, "remote", None)):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise LoadingError(
            f"environment {name!r} is {kind}, without the environments' interface: derive it from {INTERFACE}"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise LoadingError(f"environment {name!r} lacks {' and '.join(missing)}, which {INTERFACE} asks for")
    return found


class RewardFunctions(NamedTuple):
    """The reward functions of an environment. `weight_of_name` maps the name of each function in logs to its weight;
    `as_parts` is whether the result of each function is kept as a component of the reward."""

    functions: list[RewardFunction]
    weight_of_name: dict[str, float]
    as_parts: bool

    @classmethod
    def of(cls, given: object, weights: object = None, as_parts: bool = False, names: object = None) -> RewardFunctions:
        """Return the reward functions in `given`: a function, a dotted name, a list of these, or the section
        `env.reward_functions`, whose keys then replace the other arguments. Raise ValueError for an invalid argument,
        LoadingError (a ValueError) for one that cannot be imported or called."""
        if isinstance(given, Mapping):
            if not {"functions"} <= set(given) <= _KEYS:
                got = ", ".join(sorted(map(str, given))) or "nothing"
                raise ValueError(f"env.reward_functions takes functions, weights, names and as_parts, but has {got}")
            weights, names = given.get("weights"), given.get("names")
            as_parts, given = bool(given.get("as_parts", False)), given["functions"]
        single = callable(given) or isinstance(given, str)
        if not single and (isinstance(given, (bytes, set, frozenset)) or not is_iterable(given)):
            raise ValueError(
                f"reward_funcs is {in_a_line(given)}; it must be a function, the dotted name of one, or a list of these"
            )
        functions = [_function(item) for item in ([given] if single else given)]
        names = _distinct_names(functions) if names is None else _checked_names(names, len(functions))
        weights = [1.0] * len(functions) if weights is None else _numbers(weights)
        if not functions:
            raise ValueError("no reward function was given: give a list of dotted names, as [my_rewards.right]")
        if len(weights) != len(functions):
            raise ValueError(
                f"{len(functions)} reward functions and {len(weights)} weights: give each function a weight"
            )
        return cls(functions, dict(zip(names, weights)), as_parts)


def _function(name: object) -> RewardFunction:
    """Return the reward function with the dotted name `name`, or `name` itself if it is a function. Raise LoadingError
    for anything else."""
    found = import_object(name, "reward function") if isinstance(name, str) else name
    if not callable(found):
        raise LoadingError(
            f"reward function {in_a_line(name)} is of type {type(found).__name__}, which cannot be called: give a function"
        )
    return found


def _name(function: RewardFunction) -> str:
    """Return the name of a function, of the function inside a functools.partial, or of any other callable's class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _distinct_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return one distinct name per function; repeated names are numbered (`<lambda>_1`, `<lambda>_2`)."""
    names = list(map(_name, functions))
    taken = {name for name in names if names.count(name) == 1}
    for i, name in enumerate(names):
        if names.count(name) > 1 or name not in taken:
            names[i] = next(other for n in count(1) if (other := f"{name}_{n}") not in taken)
            taken.add(names[i])
    return names


def _checked_names(names: object, count: int) -> list[str]:
    several = [names] if isinstance(names, str) else names
    if not isinstance(several, (list, tuple)) or not all(isinstance(name, str) and name for name in several):
        raise ValueError(f"names of reward functions must be a list of texts, one a function, not {in_a_line(names)}")
    if len(several) != count or len(set(several)) != count:
        raise ValueError(f"{count} reward functions and the names {in_a_line(names)} were given: give one name each")
    return list(several)


def _numbers(weights: object) -> list[float]:
    several = [weights] if isinstance(weights, (int, float)) else weights
    if isinstance(several, (str, bytes, Mapping, set, frozenset)) or not is_iterable(several):
        raise ValueError(f"weights of reward functions must be a list of numbers, one each, not {in_a_line(weights)}")
    return [number("a weight of a reward function", weight, -LARGEST, LARGEST) for weight in several]


def register_env(env_name: str, actor_class_fqn: str, section: type[Section] | None = None) -> None:
    """Register the class with the dotted name `actor_class_fqn` as the environment `env_name`, with the keys of
    `section` (None: any). Raise ValueError if the name is taken."""
    if env_name in ENV_REGISTRY:
        raise ValueError(f"Env name {env_name} already registered as {ENV_REGISTRY[env_name]['actor_class_fqn']}")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}
    if section is not None:
        ENV_REGISTRY[env_name]["section"] = section


def create_env(
    env_name: str, env_config: Mapping[str, object] | None = None, actors: ActorSettings | None = None
) -> EnvironmentInterface:
    """Make an environment from its section `env.<env_name>`, with `actors` in a Ray actor, and return a handle (see
    `EnvironmentInterface.remote`). Raise ValueError for an unknown name or a class without the interface."""
    environment, settings = environment_class(env_name), dict(env_config or {})
    with user_code(f"making the environment {env_name}"):
        if actors is not None and inspect.isclass(environment) and issubclass(environment, Remotable):
            return ray_environment(environment, (settings,), {}, actors)
        return environment.remote(settings)


@dataclass
class Environments:
    """The environments of a run, task name -> environment, for training and for validation."""

    train: Mapping[str, Environment]  # environments that score training
    validation: Mapping[str, Environment] = field(default_factory=dict)  # environments that score validation
    owned: bool = True  # whether `close` ends them; environments passed in by a caller stay alive

    def close(self, patience: float | None = None) -> None:
        """End the processes of every environment; later calls do nothing. An environment that does not answer for
        `patience` seconds is abandoned; None: wait without limit."""
        if not self.owned:
            return
        self.owned = False
        different = {id(env): env for group in (self.train, self.validation) for env in group.values()}
        for environment in different.values():
            end = partial(shut_down, environment, patience)
            try:
                # without a time limit, call it in the run's thread, because a client belongs to the event loop that used it
                serve(end) if patience is None else end()
            except TimeoutError:
                print("an environment hangs and is left behind", file=sys.stderr)
