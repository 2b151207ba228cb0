"""An environment made of plain Python functions: in a notebook, `reward_funcs=my_function` is enough."""

import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from nemo_rl_cpp.argument_checks import described
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn, WeightedParts
from nemo_rl_cpp.environments.loading import RewardFunction, RewardFunctions
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment, assistant_text, prompt_text
from nemo_rl_cpp.errors import user_code
from nemo_rl_cpp.user_code import begin_user


def rewards_of(name: str, returned: object, rows: int) -> list[float | None]:
    """Return what the reward function `name` returned, as a list with a finite number or None for each of the `rows`
    completions. Raise ValueError if `returned` is anything else."""
    wanted = f"reward function {name} must return one number a completion, a list of {rows}"
    if getattr(returned, "ndim", 1) > 1:
        raise ValueError(f"{wanted}, but returned a {type(returned).__name__} of shape {tuple(returned.shape)}")
    no_list = isinstance(returned, (str, bytes, Mapping, set, frozenset)) or not isinstance(returned, Iterable)
    if no_list or getattr(returned, "ndim", 1) == 0:
        raise ValueError(f"{wanted}, but returned {described(returned)}")
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if len(values) != rows:
        raise ValueError(f"reward function {name} returned {len(values)} rewards for {rows} completions")
    for row, value in enumerate(values):
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # prevents Python's warning that the coroutine was never awaited
            raise ValueError(
                f"reward function {name} returned a coroutine for completion {row}: make the function async and await each of them"
            )
    return [
        None if value is None else finite_number(value, f"the reward of {name} for completion {row}", " or None")
        for row, value in enumerate(values)
    ]


_LARGEST = torch.finfo(torch.float32).max


def finite_number(value: object, what: str, otherwise: str = "") -> float:
    """Return `value` as a float. Raise ValueError if it is not a finite number that fits into float32; the message
    begins with `what` and ends with `otherwise`, such as " or None"."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {described(value)}; it must be a finite number{otherwise}")
    if abs(number) > _LARGEST:
        raise ValueError(f"{what} is {described(value)}; it must be a number of at most {_LARGEST:.4g}{otherwise}")
    return number


Columns = dict[str, list[object]]  # column name -> values, one per sample of the batch
Info = Mapping[str, object] | None  # column name -> value, for one sample


class RewardFunctionEnvironment(SingleTurnEnvironment[Info]):
    """An environment whose reward is the result of one function, or the (weighted) sum of the results of several.

    A function is called with keyword arguments: `prompts` and `completions` (lists of B strings), and every column of
    the samples' `extra_env_info` as a list, such as `ground_truth`. It returns B numbers. A function without `**kwargs`
    gets only the columns for which it has a parameter. None for a sample means that the function does not count for it.
    An async function is awaited.

    Args:
        reward_funcs: a function, several, their dotted names, or the environment's section of a configuration:
            {"functions": [dotted names], "weights": [numbers], "names": [names]}.
        weights: one factor per function; 1 by default.
        as_parts: make each function's reward a component `reward/<function name>`, for `adv_estimator.name: gdpo`. None
            becomes 0. The components are unweighted and the weights apply to their total.
        names: the names of the functions in logs; by default their Python names.

    A call raises ValueError for a wrong result, or if a function requires a column that the samples do not have. An
    exception in a function is raised with a message that names the function and the line. If there are several
    functions, the metric `rewards/<function name>` is the mean result of each.

    Attributes:
        weight_of_name: the weight of each function, by the function's name."""

    can_be_asked_again = True

    def __init__(
        self, reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | Mapping[str, object],
        weights: Sequence[float] | None = None, as_parts: bool = False, names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        given = RewardFunctions.of(reward_funcs, weights, as_parts, names)
        self._functions, self.weight_of_name, self._as_parts = given
        self._said_unscored = False

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Info]) -> EnvironmentReturn[Info]:
        infos = [info or {} for info in metadata]
        keys = dict.fromkeys(key for info in infos for key in info)
        columns: Columns = {key: [info.get(key) for info in infos] for key in keys}
        columns["prompts"] = [prompt_text(message_log) for message_log in message_log_batch]
        columns["completions"] = [assistant_text(message_log) for message_log in message_log_batch]
        rewards = [0.0] * len(metadata)
        scored = [False] * len(metadata)
        parts: dict[str, torch.Tensor] = {}
        asked = [_asked_for(*function, columns) for function in zip(self._functions, self.weight_of_name)]
        begun = [begin_user(function, **given) for function, given in zip(self._functions, asked)]
        for result, (name, weight) in zip(begun, self.weight_of_name.items()):
            part = torch.zeros(len(metadata), dtype=torch.float32)
            with user_code(f"reward function {name}", partial(_advice, columns)):
                returned = result()
            for row, value in enumerate(rewards_of(name, returned, len(metadata))):
                if value is not None:
                    scored[row] = True
                    part[row] = value
                    rewards[row] += weight * value
                    if len(self._functions) > 1:
                        self._means.add(f"rewards/{name}", value)
            parts[name] = part
        if not all(scored) and not self._said_unscored:
            self._said_unscored = True
            print(
                f"warning: {scored.count(False)} of {len(scored)} completions got None from every reward function; such ones count as 0",
                file=sys.stderr,
            )
        result = self._finish(rewards, metadata)
        if not self._as_parts:
            return result
        return result._replace(rewards=WeightedParts(parts, self.weight_of_name))

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise ValueError if a reward function requires a column that is not in `names`, the samples' columns."""
        columns: Columns = {name: [] for name in (*names, "prompts", "completions")}
        for function, name in zip(self._functions, self.weight_of_name):
            _asked_for(function, name, columns)


def _asked_for(function: RewardFunction, name: str, columns: Columns) -> Columns:
    """Return the columns that a reward function has parameters for. Raise ValueError if it requires another one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        raise ValueError(
            f"reward function {name} has no signature that Python knows: wrap it in a function of (completions)"
        ) from None
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [p.name for p in required if p.name not in columns]:
        raise ValueError(
            f"reward function {name} asks for {' and '.join(missing)}, but the samples have {', '.join(sorted(columns))}; every function may ask for prompts and completions, lists of texts"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return columns
    names = {p.name for p in parameters}
    return {key: value for key, value in columns.items() if key in names}


def _advice(columns: Columns, error: BaseException) -> str:
    """Return a hint if `error` is about a column that the samples do not have, or about a text that the function takes
    for a list of messages, as TRL passes it; otherwise ""."""
    if str(error).startswith(("string indices must be", "string index out of")):
        return "prompts and completions are texts here, also for conversations"
    if not isinstance(error, KeyError) or not error.args or error.args[0] in columns:
        return ""
    return f"the samples have no column {error.args[0]!r}, they have {', '.join(sorted(columns))}"
