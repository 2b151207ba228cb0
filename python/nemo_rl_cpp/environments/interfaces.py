"""The interface between rollouts and environments."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.remote import Remotable

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict

MetadataT = TypeVar("MetadataT")


class WeightedParts(dict[str, "Tensor"]):
    """Unweighted components of a reward, name -> [B]; `weights` are their weights in the total. The estimator gdpo
    weighs the components itself, after it has normalized each."""

    def __init__(self, parts: "Mapping[str, Tensor]", weights: Mapping[str, float]) -> None:
        super().__init__(parts)
        self.weights = dict(weights)

    @staticmethod
    def like(given: "dict[str, Tensor]", parts: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Return `parts` with the weights of `given`, if it has any."""
        return WeightedParts(parts, given.weights) if isinstance(given, WeightedParts) else parts


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """The result of an environment for a batch of conversations.

    Attributes:
        observations: [B] the next message: {"role", "content"}. Empty content adds no token.
        metadata: [B] the state of each conversation, passed to the next step. `mask_sample: True` in a mapping excludes
            the conversation from training, for instance if its verifier failed; the last step's value counts.
        next_stop_strings: [B] stop strings of the next turn, None for those of the generation configuration.
        rewards: [B] reward of this turn (summed over turns), or a dictionary of components [B], which are summed,
            with `WeightedParts` by their weights.
        terminateds: [B] true if the conversation has ended.
        answers: [B] the answers extracted from the responses, or None if they were not requested."""

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: "list[list[str] | None] | list[None]"
    rewards: "Tensor | dict[str, Tensor]"
    terminateds: "Tensor"
    answers: "list[str | None] | None"


def checked_return(answer: object, size: int, task: str) -> EnvironmentReturn:
    """Validate the result of an environment's `step` for `size` conversations: an EnvironmentReturn, or a plain
    sequence of the same six fields. Raise ValueError, which names the task, for anything else."""
    fields = EnvironmentReturn._fields
    if not isinstance(answer, (tuple, list)) or len(answer) != len(fields):
        given = f"{len(answer)} things" if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise ValueError(
            f"the environment of task {task} returned {given} from step: expected an EnvironmentReturn ({', '.join(fields)})"
        )
    checked = EnvironmentReturn(*answer)
    each = [*checked.rewards.items()] if isinstance(checked.rewards, dict) else [("rewards", checked.rewards)]
    each += [(name, value) for name in fields if name != "rewards" and (value := getattr(checked, name)) is not None]
    for name, values in each:
        try:
            number = len(values)
        except TypeError:
            raise ValueError(
                f"the environment of task {task} returned {type(values).__name__} as {name}: expected one entry a conversation"
            ) from None
        if number != size:
            raise ValueError(
                f"the environment of task {task} returned {number} {name} for {size} conversations: expected one entry each"
            )
    return checked


class Environment(Protocol):
    """The interface of environments: a run uses only these five names.

    A method may have `.remote(...)`, as those of `EnvironmentInterface.remote(...)` do. The run then starts the call,
    continues, and waits for the result later; calls of one environment never overlap. An exception in a method ends the
    run; the message names the environment.
    """

    scores_rows_alone: bool
    """Whether a conversation's result depends only on that conversation. If True, rollouts may call `step` with some
    rows of a batch while others are still generated."""
    runs_rollouts: bool
    """Whether its agents make the rollouts, over the policy's HTTP server; `step` is then not called."""

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """Do one turn of B conversations, each of which ends with a message of the model.

        `metadata` holds per conversation the data set's metadata, or what the last `step` returned. Every field of the
        result has one entry per conversation, in order; a plain sequence of the same six fields is also accepted.
        """

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics gathered since the last call, for the logs of the step. A run calls the method once after the
        rollouts of a step."""

    def shutdown(self) -> None:
        """End the environment's processes. Only `shutdown` itself may be called afterwards; it then does nothing."""


class EnvironmentInterface(Remotable, abc.ABC, Generic[MetadataT]):
    """The base class of environments: an `Environment` with one more method of NeMo RL. Receives conversations, returns
    observations and rewards.

    `Environment.remote(...)` returns a handle whose methods can run concurrently with the caller:
    `nemo_rl_cpp.distributed.get(env.step.remote(logs, metadata))`. A directly constructed object also works.
    """

    scores_rows_alone: bool = False
    runs_rollouts: bool = False
    can_be_asked_again: bool = False
    """Whether results depend only on `step`'s arguments, so that a lost Ray actor is restarted and called again."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Do one turn of conversations that end with the model's message (role "assistant")."""

    def global_post_process_and_metrics(self, batch: "BatchedDataDict") -> "tuple[BatchedDataDict, dict]":
        """Finish a whole batch of rollouts and return its metrics. NeMo RL's validation calls this; our runs do not."""
        return batch, {}

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics gathered over the steps since the last call; none by default."""
        return {}

    def shutdown(self) -> None:
        """End the environment's processes. Idempotent."""
