"""Plain Python functions as an environment: `reward_funcs=my_function` is all that a notebook needs."""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment, assistant_text, prompt_text

RewardFunction = Callable[..., Sequence[float | None]]


class RewardFunctionEnvironment(SingleTurnEnvironment):
    """Rewards from one function or the (weighted) sum of several.

    A function is called with keywords: `prompts` and `completions` (lists of texts, [B]) and every column of the
    samples' `extra_env_info` as a list, `ground_truth` for instance; it returns B numbers. A function without
    `**kwargs` gets only the columns that it names. None for a sample means that this function has no say in it.

    Args:
        reward_funcs: a function, several, dotted names of them, or the environment's section of a configuration:
            {"functions": [names], "weights": [numbers]}.
        weights: one factor a function; 1 if not given.

    With `as_parts` each function's reward, times its weight, is a part of its own, `reward/<function name>`, for
    `adv_estimator.name: gdpo`; None counts 0 there.

    Raises ValueError when a function returns the wrong number of rewards or one that is not finite; whatever a
    function raises reaches the caller. Metric with several functions: `rewards/<function name>`, its mean.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | dict[str, Any],
        weights: Sequence[float] | None = None,
        as_parts: bool = False,
    ) -> None:
        if isinstance(reward_funcs, dict):
            unknown = set(reward_funcs) - {"functions", "weights", "as_parts"}
            if unknown or "functions" not in reward_funcs:
                raise ValueError(f"env.reward_functions takes functions, weights and as_parts, but got {sorted(reward_funcs)}")
            weights = reward_funcs.get("weights") if weights is None else weights
            as_parts = as_parts or bool(reward_funcs.get("as_parts", False))
            reward_funcs = reward_funcs["functions"]
        single = callable(reward_funcs) or isinstance(reward_funcs, str)
        self._functions = [_resolve(item) for item in ([reward_funcs] if single else reward_funcs)]
        self._weights = [1.0] * len(self._functions) if weights is None else [float(w) for w in weights]
        if not self._functions or len(self._weights) != len(self._functions):
            raise ValueError(f"{len(self._functions)} reward functions and {len(self._weights)} weights were given")
        names = [_name(function) for function in self._functions]
        if as_parts and len(set(names)) != len(names):
            raise ValueError(f"as_parts needs functions of different names, but they are {names}")
        self._as_parts = as_parts
        self._sums = [0.0] * len(self._functions)
        self._counts = [0] * len(self._functions)

    def step(
        self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn:
        columns: dict[str, list[Any]] = {
            key: [(info or {}).get(key) for info in metadata] for key in {k: None for info in metadata for k in info or {}}
        }
        columns["prompts"] = [prompt_text(message_log) for message_log in message_log_batch]
        columns["completions"] = [assistant_text(message_log) for message_log in message_log_batch]
        rewards = [0.0] * len(metadata)
        parts: dict[str, torch.Tensor] = {}
        for i, (function, weight) in enumerate(zip(self._functions, self._weights)):
            part = [0.0] * len(metadata)
            for row, value in enumerate(_call(function, columns, len(metadata))):
                if value is not None:
                    part[row] = weight * value
                    rewards[row] += weight * value
                    self._sums[i] += value
                    self._counts[i] += 1
            parts[_name(function)] = torch.tensor(part, dtype=torch.float32)
        result = self._finish(rewards, metadata)
        return result._replace(rewards=parts) if self._as_parts else result

    def pop_metrics(self) -> dict[str, float]:
        if len(self._functions) < 2 or not any(self._counts):
            return {}
        metrics = {
            f"rewards/{_name(function)}": total / count
            for function, total, count in zip(self._functions, self._sums, self._counts)
            if count
        }
        self._sums = [0.0] * len(self._functions)
        self._counts = [0] * len(self._functions)
        return metrics


def _resolve(function: RewardFunction | str) -> RewardFunction:
    if callable(function):
        return function
    module, _, name = function.rpartition(".")
    if not module:
        raise ValueError(f"reward function {function!r} must be a dotted name: module.function")
    return getattr(importlib.import_module(module), name)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _call(function: RewardFunction, columns: dict[str, list[Any]], rows: int) -> list[float | None]:
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        columns = {key: value for key, value in columns.items() if key in parameters}
    returned = function(**columns)
    values = [None if value is None else float(value) for value in returned]
    if len(values) != rows:
        raise ValueError(f"reward function {_name(function)} returned {len(values)} rewards for {rows} completions")
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"reward function {_name(function)} returned {value} for completion {row}")
    return values
