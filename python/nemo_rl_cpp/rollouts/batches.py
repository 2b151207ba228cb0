"""The batches of a training step: `Rollouts`, which engine and environments make, and `TrainBatch`, on which the policy
trains.

Shapes: B samples have T tokens in total, concatenated. S is the length of the longest sample in padded views."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.data.interfaces import DatumSpec, Message, tokens_of
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict, RaggedBatch, offsets_of
from nemo_rl_cpp.dotted_names import is_user_defined
from nemo_rl_cpp.models.interfaces import PolicyInterface

DatumBatch = BatchedDataDict[DatumSpec]
"""A batch of rows of a data set, during a rollout."""


class MissingField(AttributeError, KeyError):
    """Raised if a batch lacks a field because no earlier stage of the training step has added it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class _Field:
    """A field of a batch, which raises MissingField if it is read before a stage has set it.

    Attributes:
        store: the dictionary of the batch that holds the field: `data`, `tokens` or `samples`.
        source: what sets the field, for the error."""

    store: str
    source: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: object, owner: type) -> Any:
        if batch is None:
            return self
        held = getattr(batch, self.store)
        if self.name not in held:
            raise self.missing()
        return held[self.name]

    def __set__(self, batch: object, value: object) -> None:
        getattr(batch, self.store)[self.name] = batch.ragged(value) if self.store == "tokens" else value

    def missing(self) -> MissingField:
        batch = "rollouts have" if self.store == "data" else "batch has"
        return MissingField(f"the {batch} no {self.name}: {self.source}")


class Rollouts(BatchedDataDict):
    """Finished conversations with their rewards, one row per sample. Columns of the data set are kept as keys, and
    reward components have the keys `reward/<name>`. The rows of one prompt form a group.

    Attributes:
        message_log: [B] lists of messages: role, content, token_ids, generation_logprobs.
        length: int64 [B], the number of tokens of each prompt.
        loss_multiplier: float32 [B], the weight of each sample; 0: a prompt that was cut.
        group_id: int64 [B], equal for samples of one prompt.
        total_reward: float32 [B], over all turns.
        raw_reward: float32 [B], as the environments gave it.
        truncated: bool [B], whether a response or an observation ran out of room.
        weight_version: int64 [B], the version of the weights that sampled the responses."""

    message_log = _Field("data", "it comes from data")
    length = _Field("data", "it comes from data")
    loss_multiplier = _Field("data", "it comes from data")
    group_id = _Field("data", "it comes from the prompt source")
    total_reward = _Field("data", "it comes from the environments")
    raw_reward = _Field("data", "it comes from the rollout collector")
    truncated = _Field("data", "it comes from the rollout")
    weight_version = _Field("data", "it comes from the rollout collector")


_OF_ROLLOUTS = "the rollouts that it was built from had none"


class TrainBatch(RaggedBatch):
    """The samples to train on. `build_train_batch` makes the batch, and each later stage of a step adds what it
    computes.

    Attributes are ragged: [T] for tokens, [B] for samples. Reading an attribute that no stage has set raises
    MissingField. A padded tensor [B, S] is converted to ragged when it is assigned. Losses and estimators may also read
    the batch as a padded mapping (`RaggedBatch`) with the same names, and reward components as `reward/<name>`.
    `values` are the critic's values, not the method of a mapping.

    Attributes:
        input_ids: int64 [T].
        token_mask: [T], 1 on the tokens that are trained.
        generation_logprobs: float32 [T] of the sampled tokens as generation reported them; 0 elsewhere.
        sample_mask: float32 [B], the weight of each sample in the loss.
        rewards: float32 [B].
        group_id: int64 [B], equal for samples of one prompt.
        weight_version: int64 [B], the version of the weights that sampled the responses.
        values: float32 [T], the critic's value of the state before each token.
        prev_logprobs: [T] of the policy before its first update; missing where generation's are as good.
        reference_policy_logprobs: [T] of the frozen first weights.
        teacher_logprobs: [T] of the teachers.
        sum_pi_squared: [T], the sum of p^2 over the vocabulary, of the policy before training.
        entropies: [T] in nats, of the policy before its first update.
        advantages: float32 [T].
        returns: float32 [T], the critic's targets.
        lacks_generation_logprobs: whether a trained message was not generated by the policy, so that its
            `generation_logprobs` are 0."""

    lacks_generation_logprobs: bool = False
    input_ids = _Field("tokens", _OF_ROLLOUTS)
    token_mask = _Field("tokens", _OF_ROLLOUTS)
    generation_logprobs = _Field("tokens", _OF_ROLLOUTS)
    sample_mask = _Field("samples", _OF_ROLLOUTS)
    rewards = _Field("samples", _OF_ROLLOUTS)
    group_id = _Field("samples", _OF_ROLLOUTS)
    weight_version = _Field("samples", _OF_ROLLOUTS)
    values = _Field("tokens", "a critic adds them before the advantages, and there is none")
    prev_logprobs = _Field("tokens", "the policy was not asked for them, since generation's are as good")
    reference_policy_logprobs = _Field("tokens", "they are added where the KL weight is not 0")
    teacher_logprobs = _Field("tokens", "the run has no teacher")
    sum_pi_squared = _Field("tokens", "they are added for the estimator optimal_token_baseline")
    entropies = _Field("tokens", "they are added where loss_fn.top_entropy_quantile is below 1")
    advantages = _Field("tokens", "the stage advantage_calculation adds them")
    returns = _Field("tokens", "an estimator that has values adds them")

    @property
    def input_lengths(self) -> Tensor:
        """int32 [B], the number of tokens of each sample."""
        return self.lengths.int()

    @property
    def valid_mask(self) -> Tensor:
        """[T], `token_mask` times the sample's `sample_mask`."""
        return self.token_mask * self.by_token(self.sample_mask)

    @property
    def is_valid(self) -> Tensor:
        """bool [T], True for tokens whose `valid_mask` is not 0."""
        return (self.token_mask != 0) & self.by_token(self.sample_mask != 0)

    @property
    def old_logprobs(self) -> Tensor:
        """[T], the log-probabilities under the policy before training: `prev_logprobs`, or if no stage added them,
        those of generation."""
        return self.prev_logprobs if "prev_logprobs" in self else self.generation_logprobs

    def __getattr__(self, name: str) -> NoReturn:
        if name in _FIELDS:  # Python also calls this if a field raises MissingField
            raise _FIELDS[name].missing()
        raise AttributeError(f"a TrainBatch has no {name}; it has {', '.join(_FIELDS)}")

    def __getitem__(self, name: str) -> Tensor:
        if name in _FIELDS and name not in self:
            raise _FIELDS[name].missing()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name in _FIELDS:
            setattr(self, name, value)
        else:
            super().__setitem__(name, value)


_FIELDS = {name: field for name, field in vars(TrainBatch).items() if isinstance(field, _Field)}


# ---- from finished conversations to the training batch


def sampled_by_policy(message: Message) -> bool:
    """Return whether the policy sampled the message, so that it has log-probabilities. GRPO trains only on such
    messages."""
    return message["role"] == "assistant" and "generation_logprobs" in message


def spoken_by_assistant(message: Message) -> bool:
    """Return whether the message has the role assistant. PPO and supervised fine-tuning train only on such messages."""
    return message["role"] == "assistant"


def build_train_batch(
    samples: Rollouts | BatchedDataDict,
    *,
    pad_token_id: int,
    divisible_by: int = 1,
    overlong_filtering: bool = False,
    is_trained: Callable[[Message], bool] = sampled_by_policy,
) -> TrainBatch:
    """Return finished rollouts with rewards as one ragged batch. The width S of its padded views is a multiple of
    `divisible_by`.

    `sample_mask` is the data's `loss_multiplier`. It is 0 for samples that the environment marks with `mask_sample`,
    and, if `overlong_filtering`, for truncated samples. `group_id`, `weight_version`, `reward_baseline` and reward
    components are copied if present."""
    logs = samples["message_log"]
    lengths = torch.tensor([*map(tokens_of, logs)])
    messages = [message for log in logs for message in log]
    sizes = torch.tensor([message["token_ids"].numel() for message in messages])
    trained = torch.tensor([int(is_trained(message)) for message in messages])
    zeros = torch.zeros(int(sizes.max()))
    logprobs = [
        message.get("generation_logprobs", zeros[:size]) for message, size in zip(messages, sizes.tolist(), strict=True)
    ]
    batch = TrainBatch(
        offsets_of(lengths),
        tokens={
            "input_ids": torch.cat([message["token_ids"] for message in messages]),
            "token_mask": trained.repeat_interleave(sizes),
            "generation_logprobs": torch.cat(logprobs).float(),
        },
        samples={"sample_mask": sample_mask(samples, overlong_filtering), "rewards": samples["total_reward"].float()},
        pad_token_id=pad_token_id,
        width=-(-int(lengths.max()) // divisible_by) * divisible_by,
    )
    batch.lacks_generation_logprobs = any(
        is_trained(message) and "generation_logprobs" not in message for message in messages
    )
    for key in samples.keys():
        if key in ("group_id", "weight_version", "reward_baseline"):
            batch.samples[key] = samples[key]
        elif str(key).startswith("reward/"):
            batch.samples[key] = samples[key].float()
    return batch


def sample_mask(samples: BatchedDataDict, overlong_filtering: bool) -> torch.Tensor:
    """Return float32 [B]: the weight of each sample in the loss, 0 for masked samples."""
    mask = torch.as_tensor(samples["loss_multiplier"]).float().clone()
    if overlong_filtering:
        mask[torch.as_tensor(samples["truncated"], dtype=torch.bool)] = 0.0
    if "mask_sample" in samples:
        mask[torch.as_tensor(samples["mask_sample"], dtype=torch.bool)] = 0.0
    return mask


def add_logprobs(
    policy: PolicyInterface, batch: TrainBatch, loss: ClippedPGLossConfig, loop: LoopConfig, weight_version: int
) -> dict[str, float]:
    """Add `prev_logprobs`, `reference_policy_logprobs` [T] and the other values that the sections `loss_fn` and the
    training loop's (such as `grpo`) need. Return the metric `stale_samples`.

    `prev_logprobs` are added if the policy does not take them from its first training forward pass (see
    `Policy.skips_prev_logprobs`), if a sample is stale, if sequences are masked by the difference from generation's
    (`seq_logprob_error_threshold`), or if an estimator reads messages that were not generated. With `bypass_mode` they
    are generation's. A sample is stale if its `weight_version` is not the current one. Stale samples keep the
    log-probabilities of the policy that sampled them, unless the loss of an asynchronous run corrects them by
    importance sampling."""
    estimator, has_reference = loop.adv_estimator.name, loss.reference_policy_kl_penalty != 0
    reads_logprobs = (
        (has_reference and loss.use_kl_in_reward)
        or estimator in ("opd", "optimal_token_baseline")
        or is_user_defined(estimator)
    )
    stale = torch.zeros(batch.size, dtype=torch.bool)
    if "weight_version" in batch:
        stale = batch.weight_version != weight_version
    compared = loop.seq_logprob_error_threshold is not None
    lacking = reads_logprobs and batch.lacks_generation_logprobs
    needed = stale.any() or not policy.skips_prev_logprobs
    if compared or lacking or (needed and not loss.bypass_mode):
        logprobs = batch.ragged(policy.get_logprobs(batch)["logprobs"])
        if stale.any() and loop.trajectory_age == 0:
            logprobs = torch.where(batch.by_token(stale), batch.generation_logprobs.to(logprobs.dtype), logprobs)
        batch.prev_logprobs = logprobs
    elif needed:
        batch.prev_logprobs = batch.generation_logprobs
    if has_reference:
        batch.reference_policy_logprobs = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    if loss.top_entropy_quantile < 1:
        batch.entropies = policy.get_entropies(batch)["entropies"]
    if loss.score_centering_k is not None:
        scored = policy.get_topk_logprobs(batch, loss.score_centering_k)
        batch.tokens["candidate_ids"], batch.tokens["candidate_old_logprobs"] = scored["ids"], scored["logprobs"]
    if estimator == "optimal_token_baseline":
        batch.sum_pi_squared = policy.get_sum_pi_squared(batch)["sum_pi_squared"]
    return {"stale_samples": int(stale.sum())}
