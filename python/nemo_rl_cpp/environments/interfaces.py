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
    """Parts of a reward, name -> [B], before weighing; `weights` are their weights in the total. The estimator gdpo weighs the parts
    itself, after it has brought each to the same scale."""

    def __init__(self, parts: "Mapping[str, Tensor]", weights: Mapping[str, float]) -> None:
        super().__init__(parts)
        self.weights = dict(weights)

    @staticmethod
    def like(given: "dict[str, Tensor]", parts: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Return other values of the parts `given`, with its weights if it has any."""
        return WeightedParts(parts, given.weights) if isinstance(given, WeightedParts) else parts


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """The answer of an environment to a batch of conversations.

    Attributes:
        observations: [B] the message that follows: {"role", "content"}. Empty content adds no token.
        metadata: [B] the state of each conversation, handed back at the next step. `mask_sample: True` in a mapping leaves the
            conversation out of training, as where its verifier failed; the last step's word counts.
        next_stop_strings: [B] stop strings of the next turn, None for those of the generation configuration.
        rewards: [B] reward of this turn (turns add up), or a dictionary of named components [B], which add up; of `WeightedParts`
            times their weights.
        terminateds: [B] true where the conversation has ended.
        answers: [B] the answers found in the responses, or None when they were not asked for.
    """

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: "list[list[str] | None] | list[None]"
    rewards: "Tensor | dict[str, Tensor]"
    terminateds: "Tensor"
    answers: "list[str | None] | None"


def checked_return(answer: object, size: int, task: str) -> EnvironmentReturn:
    """Check the answer of an environment's `step` to `size` conversations: an EnvironmentReturn, or a plain sequence
    of the same six things. Raise ValueError, which names the task, for anything else."""
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
    """An environment as a run uses it: by these five names and no others.

    A method may have `.remote(...)`, as those of `EnvironmentInterface.remote(...)` do. Then the run starts the call, works on,
    and waits for the result later; the calls of one environment never overlap. What a method raises ends the run, with the
    environment's name in the message.
    """

    scores_rows_alone: bool
    """Whether a conversation's answer depends on that conversation only. True lets rollouts call `step` with some of a
    batch's rows while the others are still generated."""
    runs_rollouts: bool
    """Whether its agents make the rollouts, over the policy's HTTP server; `step` is then not called."""

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """Do one turn of B conversations, each of which ends with a message of the model.

        `metadata` holds for each conversation what the data set gave, or what the last `step` returned. Every field
        of the answer has one entry a conversation, in their order; a plain sequence of the same six things will do.
        """

    def pop_metrics(self) -> dict[str, float]:
        """Return numbers gathered since the last call, for the logs of the step. A run calls it once after the
        rollouts of a step."""

    def shutdown(self) -> None:
        """End the environment's processes. Only `shutdown` itself may be called afterwards; it then does nothing."""


class EnvironmentInterface(Remotable, abc.ABC, Generic[MetadataT]):
    """The base class of environments: an `Environment` with NeMo RL's further method. Receives conversations, returns
    observations and rewards.

    `Environment.remote(...)` gives a handle whose methods can run while the caller works on:
    `nemo_rl_cpp.distributed.get(env.step.remote(logs, metadata))`. An object made directly works in its place.
    """

    scores_rows_alone: bool = False
    runs_rollouts: bool = False
    can_be_asked_again: bool = False
    """Whether an answer follows from `step`'s arguments alone, so that a lost Ray actor is started again and asked again."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Do one turn of conversations that end with the model's message (role "assistant")."""

    def global_post_process_and_metrics(self, batch: "BatchedDataDict") -> "tuple[BatchedDataDict, dict]":
        """Finish a whole batch of rollouts and return its metrics. NeMo RL's validation calls this method; a run here does not."""
        return batch, {}

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics gathered over the steps since the last call; none by default."""
        return {}

    def shutdown(self) -> None:
        """End the environment's processes. It may be called twice."""
