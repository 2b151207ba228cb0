"""The batches of a training step: `Rollouts`, what engine and environments made, and `TrainBatch`, what is trained on.

Shapes: B samples with T tokens in all, one sample after the other; S, the longest sample's tokens, where a view is padded.
"""

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import LENGTHS, TOKENS, RaggedBatch

DatumBatch = BatchedDataDict[DatumSpec]
"""Rows of a data set on their way through a rollout."""


class MissingField(AttributeError, KeyError):
    """A batch is asked for something that no stage has put into it."""

    def __str__(self) -> str:
        return str(self.args[0])


def _column(name: str, meaning: str, made_by: str) -> property:
    def get(self: "Rollouts") -> object:
        if name not in self.data:
            raise MissingField(f"the rollouts have no {name}: it comes from {made_by}")
        return self.data[name]

    def put(self: "Rollouts", value: object) -> None:
        self.data[name] = value

    return property(get, put, doc=meaning)


class Rollouts(BatchedDataDict):
    """Conversations with what environments said of them, one row a sample. Columns of a data set travel along, as keys, and so
    do the parts of the reward, as `reward/<name>`.

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


def _of_tokens(name: str, meaning: str) -> property:
    def put(self: "TrainBatch", value: Tensor) -> None:
        self.tokens[name] = self.ragged(value)

    return property(lambda self: self._filled(name, self.tokens), put, doc=meaning)


def _of_samples(name: str, meaning: str) -> property:
    def put(self: "TrainBatch", value: Tensor) -> None:
        self.samples[name] = value

    return property(lambda self: self._filled(name, self.samples), put, doc=meaning)


class TrainBatch(RaggedBatch):
    """What is trained on. `build_train_batch` makes it; each later stage of a step adds what it computes.

    Its attributes are ragged: [T] for tokens, [B] for samples; one that no stage has filled is a MissingField. A padded tensor
    [B, S] that is assigned is taken apart. Losses and estimators may read the same names as a mapping, padded (`RaggedBatch`),
    a part of the reward as `reward/<name>`. There is no `values()` of a mapping: `values` are the critic's.
    """

    lacks_generation_logprobs: bool = False
    """A trained message was not generated: its `generation_logprobs` are 0 for want of any."""

    input_ids = _of_tokens("input_ids", "int64 [T]")
    token_mask = _of_tokens("token_mask", "[T], 1 on the tokens that are trained")
    generation_logprobs = _of_tokens(
        "generation_logprobs", "float32 [T] of the sampled tokens as generation reported them; 0 elsewhere"
    )
    values = _of_tokens("values", "float32 [T] of the critic: the value of the state before each token")
    prev_logprobs = _of_tokens(
        "prev_logprobs", "[T] of the policy before its first update; missing where generation's are as good"
    )
    reference_policy_logprobs = _of_tokens("reference_policy_logprobs", "[T] of the frozen first weights")
    advantages = _of_tokens("advantages", "float32 [T]")
    returns = _of_tokens("returns", "float32 [T], what the critic learns")
    sample_mask = _of_samples("sample_mask", "float32 [B] weight of each sample in the loss")
    rewards = _of_samples("rewards", "float32 [B]")
    group_id = _of_samples("group_id", "int64 [B] which samples have one prompt")
    weight_version = _of_samples("weight_version", "int64 [B] which weights answered")

    @property
    def input_lengths(self) -> Tensor:
        """int32 [B] tokens of each sample."""
        return self.lengths.int()

    @property
    def valid_mask(self) -> Tensor:
        """[T]: `token_mask` by `sample_mask`."""
        return self.token_mask * self.by_token(self.sample_mask)

    @property
    def is_valid(self) -> Tensor:
        """bool [T]: where `valid_mask` is not 0."""
        return (self.token_mask != 0) & self.by_token(self.sample_mask != 0)

    @property
    def old_logprobs(self) -> Tensor:
        """[T] of the policy that is about to be trained: scored, or generation's where these are as good."""
        return self.prev_logprobs if "prev_logprobs" in self else self.generation_logprobs

    def _filled(self, name: str, among: Mapping[str, Tensor]) -> Tensor:
        if name not in among:
            raise MissingField(f"the batch has no {name}: {_MADE_BY.get(name, _FROM_ROLLOUTS)}")
        return among[name]

    def __getattr__(self, name: str) -> NoReturn:
        if name in _NAMES:  # python asks here when a property has raised
            self._filled(name, {})
        raise AttributeError(f"a TrainBatch has no {name}; it has {', '.join(_NAMES)}")

    def __getitem__(self, name: str) -> Tensor:
        if name in _NAMES and name not in self:
            self._filled(name, {})
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name in _NAMES and name != LENGTHS:
            setattr(self, name, value)
        else:
            super().__setitem__(name, value)


_NAMES = (
    TOKENS, LENGTHS, "token_mask", "generation_logprobs", "sample_mask", "rewards", "group_id", "weight_version", "values",
    "prev_logprobs", "reference_policy_logprobs", "advantages", "returns",
)  # fmt: skip
_FROM_ROLLOUTS = "the rollouts that it was built from had none"
_MADE_BY = {
    "values": "a critic adds them before the advantages, and there is none",
    "prev_logprobs": "the policy was not asked for them, since generation's are as good",
    "reference_policy_logprobs": "they are added where the KL weight is not 0",
    "advantages": "the stage advantage_calculation adds them",
    "returns": "an estimator that has values adds them",
}
