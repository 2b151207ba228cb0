"""The batches of a training step: `Rollouts`, made by engine and environments, and `TrainBatch`, on which the policy
trains.

Shapes: B samples with T tokens in total, concatenated; S is the length of the longest sample, in padded views."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.data.interfaces import DatumSpec, LLMMessageLogType, Message, tokens_of
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import LENGTHS, TOKENS, RaggedBatch, offsets_of
from nemo_rl_cpp.dotted_names import is_user_defined
from nemo_rl_cpp.models.interfaces import PolicyInterface

DatumBatch = BatchedDataDict[DatumSpec]
"""Rows of a data set during a rollout."""


class MissingField(AttributeError, KeyError):
    """Raised if a batch lacks a field because no stage has added it."""

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
    """Conversations with the environments' results, one row per sample. Columns of a data set are kept as keys;
    components of the reward are `reward/<name>`.

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
    """The samples to train on. `build_train_batch` makes it; each later stage of a step adds what it computes.

    Its attributes are ragged: [T] for tokens, [B] for samples; reading one that no stage has set raises MissingField.
    An assigned padded tensor [B, S] is converted to ragged. Losses and estimators may read the same names as a padded
    mapping (`RaggedBatch`), reward components as `reward/<name>`. `values` are the critic's, not the mapping method.
    """

    lacks_generation_logprobs: bool = False
    """Whether a trained message was not generated, so that its `generation_logprobs` are 0."""

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
    teacher_logprobs = _of_tokens("teacher_logprobs", "[T] of the teachers")
    sum_pi_squared = _of_tokens(
        "sum_pi_squared", "[T], the sum of p^2 over the vocabulary, of the policy before training"
    )
    entropies = _of_tokens("entropies", "[T] in nats, of the policy before its first update")
    advantages = _of_tokens("advantages", "float32 [T]")
    returns = _of_tokens("returns", "float32 [T], what the critic learns")
    sample_mask = _of_samples("sample_mask", "float32 [B] weight of each sample in the loss")
    rewards = _of_samples("rewards", "float32 [B]")
    group_id = _of_samples("group_id", "int64 [B] which samples have one prompt")
    weight_version = _of_samples("weight_version", "int64 [B] which weights answered")

    @property
    def input_lengths(self) -> Tensor:
        """int32 [B], the number of tokens of each sample."""
        return self.lengths.int()

    @property
    def valid_mask(self) -> Tensor:
        """[T]: `token_mask` times `sample_mask`."""
        return self.token_mask * self.by_token(self.sample_mask)

    @property
    def is_valid(self) -> Tensor:
        """bool [T]: where `valid_mask` is not 0."""
        return (self.token_mask != 0) & self.by_token(self.sample_mask != 0)

    @property
    def old_logprobs(self) -> Tensor:
        """[T], log-probabilities under the policy before training: scored, or otherwise those of generation."""
        return self.prev_logprobs if "prev_logprobs" in self else self.generation_logprobs

    def _filled(self, name: str, among: Mapping[str, Tensor]) -> Tensor:
        if name not in among:
            raise MissingField(f"the batch has no {name}: {_MADE_BY.get(name, _FROM_ROLLOUTS)}")
        return among[name]

    def __getattr__(self, name: str) -> NoReturn:
        if name in _NAMES:  # Python calls this also if a property has raised
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
    "prev_logprobs", "reference_policy_logprobs", "teacher_logprobs", "entropies", "sum_pi_squared", "advantages",
    "returns",
)  # fmt: skip
_FROM_ROLLOUTS = "the rollouts that it was built from had none"
_MADE_BY = {
    "values": "a critic adds them before the advantages, and there is none",
    "prev_logprobs": "the policy was not asked for them, since generation's are as good",
    "reference_policy_logprobs": "they are added where the KL weight is not 0",
    "teacher_logprobs": "the run has no teacher",
    "sum_pi_squared": "they are added for the estimator optimal_token_baseline",
    "entropies": "they are added where loss_fn.top_entropy_quantile is below 1",
    "advantages": "the stage advantage_calculation adds them",
    "returns": "an estimator that has values adds them",
}


# ---- from finished conversations to the training batch


def sampled_by_policy(message: Message) -> bool:
    """Return whether the policy sampled the message, which then has log-probabilities. GRPO trains only on these."""
    return message["role"] == "assistant" and "generation_logprobs" in message


def spoken_by_assistant(message: Message) -> bool:
    """Return whether the message is from the assistant. PPO trains only on these messages."""
    return message["role"] == "assistant"


def add_token_loss_masks(
    message_logs: list[LLMMessageLogType], is_trained: Callable[[Message], bool] = sampled_by_policy
) -> None:
    """Add to every message, in place, `token_loss_mask` (1 on trained tokens, otherwise 0; shaped like `token_ids`),
    and `generation_logprobs` of zeros if it has none."""
    messages = [message for log in message_logs for message in log]
    lengths = [message["token_ids"].numel() for message in messages]
    trained = torch.tensor([int(is_trained(message)) for message in messages], dtype=torch.int64)
    masks = trained.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).split(lengths)
    zeros = torch.zeros(sum(lengths), dtype=torch.float32).split(lengths)
    for message, mask, zero in zip(messages, masks, zeros, strict=True):
        message["token_loss_mask"] = mask
        message.setdefault("generation_logprobs", zero)


def build_train_batch(
    samples: Rollouts | BatchedDataDict,
    *,
    pad_token_id: int,
    divisible_by: int = 1,
    overlong_filtering: bool = False,
    is_trained: Callable[[Message], bool] = sampled_by_policy,
) -> TrainBatch:
    """Return the rows of `samples` (rolled out, with rewards) as one ragged batch. The width S of its padded views is a
    multiple of `divisible_by`.

    `sample_mask` is the data's `loss_multiplier`; 0 for samples that the environment flags with `mask_sample`, and with
    `overlong_filtering` for truncated samples. `group_id`, `weight_version` and reward components are copied if
    present.
    """
    logs = samples["message_log"]
    lacking = any(is_trained(message) and "generation_logprobs" not in message for log in logs for message in log)
    add_token_loss_masks(logs, is_trained)
    lengths = torch.tensor([*map(tokens_of, logs)])

    if not len(lengths) or not bool(lengths.all()):
        where = "no sample" if not len(lengths) else f"sample {int((lengths == 0).nonzero()[0])} has no token"
        raise ValueError(f"there is nothing to train on: {where}")

    def joined(key: str) -> torch.Tensor:
        return torch.cat([message[key] for log in logs for message in log])

    batch = TrainBatch(
        offsets_of(lengths),
        tokens={
            "input_ids": joined("token_ids"),
            "token_mask": joined("token_loss_mask"),
            "generation_logprobs": joined("generation_logprobs").float(),
        },
        samples={"sample_mask": sample_mask(samples, overlong_filtering), "rewards": samples["total_reward"].float()},
        pad_token_id=pad_token_id,
        width=-(-int(lengths.max()) // divisible_by) * divisible_by,
    )
    batch.lacks_generation_logprobs = lacking
    for key in samples.keys():
        if key in ("group_id", "weight_version", "reward_baseline"):
            batch.samples[key] = samples[key]
        elif str(key).startswith("reward/"):
            batch.samples[key] = samples[key].float()
    return batch


def sample_mask(samples: BatchedDataDict, overlong_filtering: bool) -> torch.Tensor:
    """Return float32 [B]: the weight of each sample in the loss."""
    mask = torch.as_tensor(samples["loss_multiplier"]).float().clone()
    if overlong_filtering:
        mask[torch.as_tensor(samples["truncated"], dtype=torch.bool)] = 0.0
    if "mask_sample" in samples:
        mask[torch.as_tensor(samples["mask_sample"], dtype=torch.bool)] = 0.0
    return mask


class LogprobNeeds(NamedTuple):
    """The log-probabilities that a run needs, according to its configuration.

    Attributes:
        reference: the KL weight is not 0.
        previous: always score the batch before training, even if generation's log-probabilities are exact, because
            masking sequences by their error needs the scores before training.
        corrected: the loss corrects stale samples by importance sampling, so their `prev_logprobs` are the current
            policy's; otherwise those of the policy that sampled them.
        estimator: the advantages use log-probabilities (KL in the reward, a teacher, or a custom estimator), so
            messages that were not generated are scored.
        bypassed: the loss takes generation's log-probabilities for the old policy's.
        entropies: the loss takes the tokens with the largest entropy.
        sum_pi_squared: the estimator takes them.
        candidates: how many of the likeliest tokens the loss takes."""

    reference: bool
    previous: bool
    corrected: bool = False
    estimator: bool = False
    bypassed: bool = False
    entropies: bool = False
    sum_pi_squared: bool = False
    candidates: int | None = None

    @classmethod
    def of(cls, loss: ClippedPGLossConfig, loop: LoopConfig) -> Self:
        """Derive the needs from the sections `loss_fn` (KL in the loss or in the reward) and `grpo` or `ppo`."""
        reference = loss.reference_policy_kl_penalty != 0
        return cls(
            reference,
            previous=loop.seq_logprob_error_threshold is not None,
            corrected=loop.trajectory_age > 0,
            estimator=(reference and loss.use_kl_in_reward)
            or loop.adv_estimator.name in ("opd", "optimal_token_baseline")
            or is_user_defined(loop.adv_estimator.name),
            bypassed=loss.bypass_mode,
            entropies=loss.top_entropy_quantile < 1,
            sum_pi_squared=loop.adv_estimator.name == "optimal_token_baseline",
            candidates=loss.score_centering_k,
        )


def add_logprobs(
    policy: PolicyInterface, batch: TrainBatch, needs: LogprobNeeds, weight_version: int
) -> dict[str, float]:
    """Add `prev_logprobs` and `reference_policy_logprobs` [T] if they are needed.

    `prev_logprobs` are left out if the policy takes them from its first training forward pass (which is exact, see
    `Policy.skips_prev_logprobs`) and every trained message that an estimator reads was generated. Stale samples
    (`weight_version` is not the current one) keep the log-probabilities of the policy that sampled them, unless the
    loss corrects them. Return the metric `stale_samples`."""
    policy.prepare_for_lp_inference()
    stale = torch.zeros(batch.size, dtype=torch.bool)
    if "weight_version" in batch:
        stale = batch.weight_version != weight_version
    lacking = needs.estimator and batch.lacks_generation_logprobs
    needed = stale.any() or not policy.skips_prev_logprobs
    if needs.previous or lacking or (needed and not needs.bypassed):
        logprobs = batch.ragged(policy.get_logprobs(batch)["logprobs"])
        if stale.any() and not needs.corrected:
            logprobs = torch.where(batch.by_token(stale), batch.generation_logprobs.to(logprobs.dtype), logprobs)
        batch.prev_logprobs = logprobs
    elif needed:
        batch.prev_logprobs = batch.generation_logprobs
    if needs.reference:
        batch.reference_policy_logprobs = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    if needs.entropies:
        batch.entropies = policy.get_entropies(batch)["entropies"]
    if needs.candidates is not None:
        scored = policy.get_topk_logprobs(batch, needs.candidates)
        batch.tokens["candidate_ids"], batch.tokens["candidate_old_logprobs"] = scored["ids"], scored["logprobs"]
    if needs.sum_pi_squared:
        batch.sum_pi_squared = policy.get_sum_pi_squared(batch)["sum_pi_squared"]
    return {"stale_samples": int(stale.sum())}
