"""The batches of a training step: `Rollouts`, what engine and environments made, and `TrainBatch`, what is trained on.

Shapes: B samples; S columns, the longest sample's tokens (padded on the right).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict

PART = "reward/"
"""What the name of a part of the reward begins with, as a key of a batch."""


class MissingField(AttributeError, KeyError):
    """A batch is asked for something that no stage has put into it."""

    def __str__(self) -> str:
        return str(self.args[0])


def _column(name: str, meaning: str, made_by: str) -> Any:
    def get(self: "Rollouts") -> Any:
        if name not in self.data:
            raise MissingField(f"the rollouts have no {name}: it comes from {made_by}")
        return self.data[name]

    def put(self: "Rollouts", value: Any) -> None:
        self.data[name] = value

    return property(get, put, doc=meaning)


class Rollouts(BatchedDataDict):
    """Conversations with what environments said of them, one row a sample. Columns of a data set travel along, as keys.

    A row belongs to a group: the samples of one prompt.
    """

    message_log = _column("message_log", "[B] lists of messages: role, content, token_ids, generation_logprobs", "data")
    length = _column("length", "int64 [B] tokens of each prompt", "data")
    loss_multiplier = _column("loss_multiplier", "float32 [B] weight of each sample; 0: a prompt that was cut", "data")
    group_id = _column("group_id", "int64 [B] which samples have one prompt", "the prompt source")
    total_reward = _column("total_reward", "float32 [B] over all turns", "the environments")
    raw_reward = _column("raw_reward", "float32 [B] as the environments gave it", "the rollout runner")
    truncated = _column("truncated", "bool [B] a response or an observation ran out of room", "the rollout")
    weight_version = _column("weight_version", "int64 [B] which weights answered", "the rollout runner")

    @property
    def unshaped_reward(self) -> Tensor:
        """float32 [B] before shaping: shaping must not make a group look mixed that is not."""
        return self.data["unshaped_total_reward"] if "unshaped_total_reward" in self.data else self.total_reward

    @property
    def parts(self) -> dict[str, Tensor]:
        """name -> float32 [B]: the parts of the reward, where environments give any."""
        return {key[len(PART) :]: value for key, value in self.data.items() if str(key).startswith(PART)}


@dataclass(eq=False)
class TrainBatch:
    """What is trained on. `build_train_batch` makes it; each later stage of a step adds what it computes.

    Read as a mapping of these names, too, by losses and estimators (a part of the reward as `reward/<name>`); further keys that
    one sets there stay with the batch. A name that no stage has filled is a MissingField. There is no `values()` of a mapping:
    `values` are the critic's.

    Attributes:
        input_ids: int64 [B, S].
        input_lengths: int32 [B] tokens of each row.
        token_mask: [B, S], 1 on the tokens that are trained.
        sample_mask: float32 [B] weight of each sample in the loss.
        generation_logprobs: float32 [B, S] of the sampled tokens as generation reported them; 0 elsewhere.
        rewards: float32 [B].
        group_id: int64 [B] which samples have one prompt.
        weight_version: int64 [B] which weights answered.
        reward_parts: name -> float32 [B].
        values: float32 [B, S] of the critic: column t is the value of the state before token t.
        prev_logprobs: float32 [B, S] of the policy before its first update; missing where generation's are as good.
        reference_policy_logprobs: float32 [B, S] of the frozen first weights.
        advantages: float32 [B, S].
        returns: float32 [B, S], what the critic learns.
    """

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    generation_logprobs: Tensor
    sample_mask: Tensor
    rewards: Tensor
    group_id: Tensor = field(init=False)
    weight_version: Tensor = field(init=False)
    values: Tensor = field(init=False)
    prev_logprobs: Tensor = field(init=False)
    reference_policy_logprobs: Tensor = field(init=False)
    advantages: Tensor = field(init=False)
    returns: Tensor = field(init=False)
    reward_parts: dict[str, Tensor] = field(default_factory=dict)
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """B."""
        return len(self.input_ids)

    @property
    def valid_mask(self) -> Tensor:
        """[B, S]: 1 on the tokens that are trained, of samples that count."""
        return self.token_mask * self.sample_mask[:, None]

    @property
    def is_valid(self) -> Tensor:
        """bool [B, S]: where `valid_mask` is not 0."""
        return (self.token_mask != 0) & (self.sample_mask != 0)[:, None]

    @property
    def old_logprobs(self) -> Tensor:
        """float32 [B, S] of the policy that is about to be trained: scored, or generation's where these are as good."""
        return self.prev_logprobs if "prev_logprobs" in self else self.generation_logprobs

    def __getattr__(self, name: str) -> Any:
        if name in _MADE_BY:
            raise MissingField(f"the batch has no {name}: {_MADE_BY[name]}")
        raise AttributeError(f"a TrainBatch has no {name}; it has {', '.join(_NAMES)}")

    # ---- as a mapping

    def __getitem__(self, key: str) -> Any:
        if key.startswith(PART):
            return self.reward_parts[key[len(PART) :]]
        return getattr(self, key) if key in _NAMES else self.further[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key.startswith(PART):
            self.reward_parts[key[len(PART) :]] = value
        elif key in _NAMES:
            setattr(self, key, value)
        else:
            self.further[key] = value

    def __delitem__(self, key: str) -> None:
        if key.startswith(PART):
            del self.reward_parts[key[len(PART) :]]
        elif key in _NAMES:
            delattr(self, key)
        else:
            del self.further[key]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in _NAMES if name in self.__dict__)
        yield from (PART + name for name in self.reward_parts)
        yield from self.further

    def keys(self) -> list[str]:
        return list(self)

    def items(self) -> Iterator[tuple[str, Any]]:
        return ((key, self[key]) for key in self)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return any(key == name for name in self)


_NAMES = tuple(f.name for f in fields(TrainBatch) if f.name not in ("reward_parts", "further"))
_MADE_BY = {
    "group_id": "the rollouts that it was built from had none",
    "weight_version": "the rollouts that it was built from had none",
    "values": "a critic adds them before the advantages, and there is none",
    "prev_logprobs": "the policy was not asked for them, since generation's are as good",
    "reference_policy_logprobs": "they are added where the KL weight is not 0",
    "advantages": "the stage advantage_calculation adds them",
    "returns": "an estimator that has values adds them",
}
