"""Plain Python functions as an environment: `reward_funcs=my_function` is all that a notebook needs."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.loading import reward_function
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment, assistant_text, prompt_text
from nemo_rl_cpp.errors import user_code

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

    Raises ValueError when a function returns the wrong number of rewards or one that is not finite, or asks
    for a column that the samples do not have; whatever a function raises reaches the caller, with a message that names the
    function and its line. Metric with several functions: `rewards/<function name>`, its mean.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | dict[str, Any],
        weights: Sequence[float] | None = None,
    ) -> None:
        if isinstance(reward_funcs, dict):
            unknown = set(reward_funcs) - {"functions", "weights"}
            if unknown or "functions" not in reward_funcs:
                raise ValueError(f"env.reward_functions takes functions and weights, but got {sorted(reward_funcs)}")
            weights = reward_funcs.get("weights") if weights is None else weights
            reward_funcs = reward_funcs["functions"]
        single = callable(reward_funcs) or isinstance(reward_funcs, str)
        self._functions = [reward_function(item) for item in ([reward_funcs] if single else reward_funcs)]
        self._weights = [1.0] * len(self._functions) if weights is None else [float(w) for w in weights]
        if not self._functions or len(self._weights) != len(self._functions):
            raise ValueError(f"{len(self._functions)} reward functions and {len(self._weights)} weights were given")
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
        for i, (function, weight) in enumerate(zip(self._functions, self._weights)):
            for row, value in enumerate(_call(function, columns, len(metadata))):
                if value is not None:
                    rewards[row] += weight * value
                    self._sums[i] += value
                    self._counts[i] += 1
        return self._finish(rewards, metadata)

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


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _call(function: RewardFunction, columns: dict[str, list[Any]], rows: int) -> list[float | None]:
    with user_code(f"reward function {_name(function)}", partial(_missing_column, columns)):
        returned = function(**_asked_for(function, columns))
    values = [None if value is None else float(value) for value in returned]
    if len(values) != rows:
        raise ValueError(f"reward function {_name(function)} returned {len(values)} rewards for {rows} completions")
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"reward function {_name(function)} returned {value} for completion {row}")
    return values


def _asked_for(function: RewardFunction, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that a function takes; ValueError where it asks for one that is not there."""
    parameters = inspect.signature(function).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in columns]
    if missing:
        raise ValueError(f"reward function {_name(function)} asks for {' and '.join(missing)}, but the samples have {', '.join(sorted(columns))}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return columns
    names = {p.name for p in parameters}
    return {key: value for key, value in columns.items() if key in names}


def _missing_column(columns: dict[str, list[Any]], error: BaseException) -> str:
    """What to add to a KeyError for a column that the samples do not have."""
    if not isinstance(error, KeyError) or not error.args or error.args[0] in columns:
        return ""
    return f"the samples have no column {error.args[0]!r}, they have {', '.join(sorted(columns))}"
