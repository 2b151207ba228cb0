"""The lookup of environments and reward functions by name, and the collection of a run's environments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.dotted_names import LoadingError, import_object
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentInterface
from nemo_rl_cpp.environments.remote import ActorSettings, Remotable, ray_environment, shut_down
from nemo_rl_cpp.errors import user_code
from nemo_rl_cpp.user_code import serve

INTERFACE = "nemo_rl_cpp.environments.interfaces.EnvironmentInterface"


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
            f"environment {name!r} is {kind}, without the interface of environments: derive the class from {INTERFACE}"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise LoadingError(f"environment {name!r} lacks {' and '.join(missing)}, which {INTERFACE} asks for")
    return found


def reward_function(name: object) -> Callable[..., Sequence[float | None]]:
    """Return the reward function with the dotted name `name`, or a given one. Raise LoadingError for others."""
    found = import_object(name, "reward function") if isinstance(name, str) else name
    if not callable(found):
        raise LoadingError(
            f"reward function {in_a_line(name)} is of type {type(found).__name__}, which cannot be called: give a function"
        )
    return found


def register_env(env_name: str, actor_class_fqn: str, section: type[Section] | None = None) -> None:
    """Register the class with the dotted name `actor_class_fqn` as the environment `env_name` of configurations.

    `section` describes the keys of `env.<env_name>` (None: any key). Raise ValueError if the name is taken."""
    if env_name in ENV_REGISTRY:
        raise ValueError(f"Env name {env_name} already registered as {ENV_REGISTRY[env_name]['actor_class_fqn']}")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}
    if section is not None:
        ENV_REGISTRY[env_name]["section"] = section


def create_env(
    env_name: str, env_config: Mapping[str, object] | None = None, actors: ActorSettings | None = None
) -> EnvironmentInterface:
    """Make an environment from its section `env.<env_name>`, and return a handle to it (see
    `EnvironmentInterface.remote`). With `actors` it runs in a Ray actor, and Ray is started if needed. Raise ValueError
    for an unknown name, or for a class without the interface of environments."""
    environment = environment_class(env_name)
    try:
        settings = dict(env_config or {})
    except (TypeError, ValueError):
        raise ValueError(
            f"env.{env_name} must be a section (lines of key: value), not {in_a_line(env_config)}"
        ) from None
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
