"""The interface between rollouts and environments."""

import abc
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from nemo_rl_cpp.argument_checks import described
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.remote import Remotable

if TYPE_CHECKING:
    from torch import Tensor

MetadataT = TypeVar("MetadataT")


class WeightedParts(dict[str, "Tensor"]):
    """The unweighted components of a reward, name -> [B], and their weights in the total. The estimator gdpo normalizes
    each component before it applies the weights."""

    def __init__(self, parts: "Mapping[str, Tensor]", weights: Mapping[str, float]) -> None:
        super().__init__(parts)
        self.weights = dict(weights)


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """The result of an environment for a batch of B conversations.

    Attributes:
        observations: the next message of each conversation, {"role", "content"}. Empty content adds no token.
        metadata: the state of each conversation, passed to the next step. A mapping with `mask_sample: True` excludes the
            conversation from training, for instance because its verifier failed; the value of the last step counts.
        next_stop_strings: stop strings of the next turn, in addition to the generation configuration's, or None.
        rewards: the reward of this turn, or a dictionary of components [B]. A rollout's total reward is the sum over
            its turns and components, weighted if they are `WeightedParts`.
        terminateds: whether each conversation has ended.
        answers: the answers extracted from the responses, or None if they were not requested."""

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: "list[list[str] | None] | list[None]"
    rewards: "Tensor | dict[str, Tensor]"
    terminateds: "Tensor"
    answers: "list[str | None] | None"


_OPTIONAL = ("metadata", "next_stop_strings", "answers")  # fields that may be None


def checked_return(answer: object, size: int, task: str) -> EnvironmentReturn:
    """Return the result of an environment's `step` for `size` conversations as an EnvironmentReturn. A plain sequence
    of the same six fields is also accepted. Raise ValueError with the task's name for anything else."""
    fields = EnvironmentReturn._fields
    if not isinstance(answer, (tuple, list)) or len(answer) != len(fields):
        given = f"{len(answer)} things" if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise ValueError(
            f"the environment of task {task} returned {given} from step: expected an EnvironmentReturn ({', '.join(fields)})"
        )
    checked = EnvironmentReturn(*answer)
    rewards = [*checked.rewards.items()] if isinstance(checked.rewards, dict) else [("rewards", checked.rewards)]
    others = [(name, getattr(checked, name)) for name in fields if name != "rewards"]
    each = rewards + [(name, values) for name, values in others if values is not None or name not in _OPTIONAL]
    for name, values in each:
        try:
            number = len(values)
        except TypeError:
            raise ValueError(
                f"the environment of task {task} returned {type(values).__name__} as {name}: expected one entry a conversation"
            ) from None
        if number != size:
            raise ValueError(
                f"the environment of task {task} returned {number} {name} for {size} conversations: give one each"
            )
    for name, values in rewards:
        shape = tuple(getattr(values, "shape", (size,)))
        if len(shape) != 1 or (isinstance(values, (list, tuple)) and None in values):
            given = "None" if len(shape) == 1 else f"the shape {shape}"
            raise ValueError(
                f"the environment of task {task} returned {name} with {given}: expected one number a conversation"
            )
    for number, message in enumerate(checked.observations):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"the environment of task {task} returned {described(message)} as observation {number}: expected "
                "{'role': 'environment', 'content': text}, with an empty text if there is none"
            )
    return checked


class Mean(float):
    """The mean of a number over `count` samples, whose sum is `total`."""

    count: float

    def __new__(cls, total: float, count: float = 1) -> Self:
        mean = super().__new__(cls, total / max(count, 1))
        mean.count = count
        return mean


class _Means(dict[str, tuple[float, float]]):
    """Numbers whose means are metrics: name -> (their sum, the number of samples)."""

    def add(self, name: str, value: float, count: float = 1) -> None:
        """Add `value`, the sum of a number over `count` samples, to the mean `name`."""
        total, samples = self.get(name, (0.0, 0.0))
        self[name] = total + value, samples + count


class Environment(Protocol):
    """The interface of environments. A run uses only the five members below.

    A method may have `.remote(...)`, like the methods of the handle that `EnvironmentInterface.remote(...)` returns.
    The run then starts the call, continues, and waits for the result later. Calls of one environment never overlap. An
    exception in a method ends the run, with a message that names the environment."""

    scores_rows_alone: bool
    """Whether a conversation's result depends only on that conversation. If True, rollouts may call `step` with some
    rows of a batch while the others are still generated."""
    runs_rollouts: bool
    """Whether the environment's agents make the rollouts, through the policy's HTTP server. `step` is then unused."""

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """Do one turn of B conversations, each of which ends with a message of the model, and return the result.

        `metadata` has one entry per conversation: the data set's metadata, or what the previous `step` returned. Every
        field of the result also has one entry per conversation, in the same order. A plain sequence of the six fields
        is also accepted."""

    def pop_metrics(self) -> dict[str, float]:
        """Return, once after a step's rollouts, the metrics since the last call, which are logged with the step."""

    def shutdown(self) -> None:
        """End the environment's processes. Afterwards only `shutdown` may be called, which then does nothing."""


class EnvironmentInterface(Remotable, abc.ABC, Generic[MetadataT]):
    """The base class of environments, which receive conversations and return observations and rewards. The methods of
    `Environment.remote(...)` run concurrently with the caller: `nemo_rl_cpp.distributed.get(env.step.remote(logs,
    metadata))`. A directly constructed object also works."""

    scores_rows_alone: bool = False
    runs_rollouts: bool = False
    can_be_asked_again: bool = False
    """Whether the result of `step` depends only on its arguments. If True, a lost Ray actor is restarted and called again."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Do one turn of conversations, each of which ends with the model's message (role "assistant")."""

    @cached_property
    def _means(self) -> "_Means":
        return _Means()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: by default the means of what `step` added to `_means`."""
        sums, self._means = self._means, _Means()
        return {name: Mean(total, count) for name, (total, count) in sums.items()}

    def shutdown(self) -> None:
        """End the environment's processes. Further calls do nothing."""
