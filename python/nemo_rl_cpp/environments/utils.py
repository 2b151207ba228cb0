"""Environments by name, and work dealt out to workers."""

import importlib
from typing import Any

from nemo_rl_cpp.environments.interfaces import EnvironmentInterface

ENV_REGISTRY: dict[str, dict[str, str]] = {
    "math": {"actor_class_fqn": "nemo_rl_cpp.environments.math_environment.MathEnvironment"},
    "math_default": {"actor_class_fqn": "nemo_rl_cpp.environments.math_environment.MathEnvironment"},
    "math_multi_reward": {"actor_class_fqn": "nemo_rl_cpp.environments.multi_reward.MathMultiRewardEnvironment"},
    "arithmetic": {"actor_class_fqn": "nemo_rl_cpp.environments.arithmetic_environment.ArithmeticEnvironment"},
    "reverse_digits": {"actor_class_fqn": "nemo_rl_cpp.environments.reverse_digits_environment.ReverseDigitsEnvironment"},
    "reasoning_gym": {"actor_class_fqn": "nemo_rl_cpp.environments.reasoning_gym_environment.ReasoningGymEnvironment"},
    "reward_functions": {"actor_class_fqn": "nemo_rl_cpp.environments.reward_environment.RewardFunctionEnvironment"},
    "guess_number": {"actor_class_fqn": "nemo_rl_cpp.environments.games.guess_number.GuessNumberEnv"},
    "code": {"actor_class_fqn": "nemo_rl_cpp.environments.code_environment.CodeEnvironment"},
}
"""Environment name -> {"actor_class_fqn": dotted name of its class}. `register_env` adds one at run time."""


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

    `env_name` is a registered name or the dotted name of a class. Raises ValueError for an unknown one.
    """
    target = ENV_REGISTRY[env_name]["actor_class_fqn"] if env_name in ENV_REGISTRY else env_name
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise ValueError(f"no environment is called {env_name!r}; known: {', '.join(sorted(ENV_REGISTRY))}; "
                         "register_env or a dotted class name adds one")  # fmt: skip
    environment = getattr(importlib.import_module(module_name), class_name)
    return environment.remote(dict(env_config or {}))
