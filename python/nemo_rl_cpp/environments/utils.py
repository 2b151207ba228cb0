"""Environments by name."""

import inspect
from collections.abc import Mapping

from nemo_rl_cpp.argument_checks import in_a_line
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface
from nemo_rl_cpp.environments.loading import environment_class
from nemo_rl_cpp.environments.ray_environment import ActorSettings, ray_environment
from nemo_rl_cpp.environments.remote import Remotable, shut_down
from nemo_rl_cpp.errors import user_code

__all__ = ["ENV_REGISTRY", "create_env", "register_env", "shut_down"]


def register_env(env_name: str, actor_class_fqn: str, section: type[Section] | None = None) -> None:
    """Makes `create_env` and configurations know a class by its dotted name.

    `section` lists the keys of `env.<env_name>`; without it the environment takes any. Raises ValueError when the name is taken.
    """
    if env_name in ENV_REGISTRY:
        raise ValueError(f"Env name {env_name} already registered as {ENV_REGISTRY[env_name]['actor_class_fqn']}")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}
    if section is not None:
        ENV_REGISTRY[env_name]["section"] = section


def create_env(
    env_name: str, env_config: Mapping[str, object] | None = None, actors: ActorSettings | None = None
) -> EnvironmentInterface:
    """A handle on a new environment (see `Environment.remote`) made from its section of the configuration. With `actors` it lives
    in Ray actors, kept so; Ray is started where there is none.

    `env_name` is a registered name or the dotted name of a class. Raises ValueError for an unknown one, and for a class
    without the interface of environments.
    """
    environment = environment_class(env_name, ENV_REGISTRY)
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
