"""Environments by name, and work dealt out to workers."""

from typing import Any

from nemo_rl_cpp.environments.interfaces import EnvironmentInterface
from nemo_rl_cpp.environments.loading import ENV_REGISTRY, environment_class
from nemo_rl_cpp.errors import user_code

__all__ = ["ENV_REGISTRY", "chunk_list_to_workers", "create_env", "register_env"]


def chunk_list_to_workers(to_chunk: list[Any], num_workers: int) -> list[list[Any]]:
    """Consecutive parts of ceil(n / num_workers) items, in order; the last may be shorter.

    With fewer items than workers every item is a part of its own, followed by empty parts.
    """
    if len(to_chunk) <= num_workers:
        return [[item] for item in to_chunk] + [[] for _ in range(num_workers - len(to_chunk))]
    size = -(-len(to_chunk) // num_workers)
    return [to_chunk[start : start + size] for start in range(0, len(to_chunk), size)]


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Makes `create_env` know a class by its dotted name. Raises ValueError when the name is taken."""
    if env_name in ENV_REGISTRY:
        raise ValueError(f"Env name {env_name} already registered as {ENV_REGISTRY[env_name]['actor_class_fqn']}")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def create_env(env_name: str, env_config: dict[str, Any] | None = None) -> EnvironmentInterface:
    """A handle on a new environment (see `Environment.remote`) made from its section of the configuration.

    `env_name` is a registered name or the dotted name of a class. Raises ValueError for an unknown one, and for a class
    without the interface of environments.
    """
    environment = environment_class(env_name, ENV_REGISTRY)
    with user_code(f"making the environment {env_name}"):
        return environment.remote(dict(env_config or {}))
