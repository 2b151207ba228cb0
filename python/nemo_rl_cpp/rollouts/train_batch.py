"""From finished conversations to the batch that the policy trains on, and the log-probabilities that it needs beside the rollout's."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch

from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, Message, tokens_of
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import offsets_of
from nemo_rl_cpp.dotted_names import is_user_defined
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch


def sampled_by_policy(message: Message) -> bool:
    """GRPO trains the messages that the policy has sampled itself: they carry their log-probabilities."""
    return message["role"] == "assistant" and "generation_logprobs" in message


def spoken_by_assistant(message: Message) -> bool:
    """PPO trains every message of the assistant."""
    return message["role"] == "assistant"


def add_token_loss_masks(
    message_logs: list[LLMMessageLogType], is_trained: Callable[[Message], bool] = sampled_by_policy
) -> None:
    """Adds to every message, in place, `token_loss_mask` (1 on the tokens that are trained, else 0; like `token_ids`),
    and `generation_logprobs` of zeros where there are none."""
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
    """The rows of `samples` (rolled out, with rewards) as one ragged batch; its padded views have a width S that is a multiple of
    `divisible_by`.

    `sample_mask` is the data's `loss_multiplier`; 0 for samples that the environment flags by `mask_sample`, and with
    `overlong_filtering` for truncated ones. `group_id`, `weight_version` and the parts of the reward as far as the samples
    have them.
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
        if key in ("group_id", "weight_version"):
            batch.samples[key] = samples[key]
        elif str(key).startswith("reward/"):
            batch.samples[key] = samples[key].float()
    return batch


def sample_mask(samples: BatchedDataDict, overlong_filtering: bool) -> torch.Tensor:
    """float32 [B]: the weight of each sample in the loss."""
    mask = torch.as_tensor(samples["loss_multiplier"]).float().clone()
    if overlong_filtering:
        mask[torch.as_tensor(samples["truncated"], dtype=torch.bool)] = 0.0
    if "mask_sample" in samples:
        mask[torch.as_tensor(samples["mask_sample"], dtype=torch.bool)] = 0.0
    return mask


class LogprobNeeds(NamedTuple):
    """What a run needs, by its configuration.

    Attributes:
        reference: the KL weight is not 0.
        previous: always score the batch before training, even where generation's log-probabilities are as good: for
            masking sequences by their error, which must be known before training.
        corrected: the loss corrects samples of older weights by importance sampling, so their `prev_logprobs` are the present
            policy's; else those of the policy that sampled them.
        estimator: the advantages are made from them (KL in the reward, or an estimator of the user's), so that a message which
            was not generated is scored.
    """

    reference: bool
    previous: bool
    corrected: bool = False
    estimator: bool = False

    @classmethod
    def of(cls, loss: ClippedPGLossConfig, loop: LoopConfig) -> Self:
        """By the sections `loss_fn` (KL in the loss or in the reward) and `grpo` or `ppo`."""
        reference = loss.reference_policy_kl_penalty != 0
        return cls(
            reference,
            previous=loop.seq_logprob_error_threshold is not None,
            corrected=loop.trajectory_age > 0,
            estimator=(reference and loss.use_kl_in_reward) or is_user_defined(loop.adv_estimator.name),
        )


def add_logprobs(
    policy: PolicyInterface, batch: TrainBatch, needs: LogprobNeeds, weight_version: int
) -> dict[str, float]:
    """Adds `prev_logprobs` and `reference_policy_logprobs` [T] as far as they are needed.

    `prev_logprobs` are left out when the policy takes those of its first training forward (it is exact, see
    `Policy.skips_prev_logprobs`), and every trained message that an estimator reads was generated. Samples generated under older weights (`weight_version` is not the current one) keep the
    log-probabilities of the policy that sampled them, unless the loss corrects them. Returns the metric `stale_samples`.
    """
    policy.prepare_for_lp_inference()
    stale = torch.zeros(batch.size, dtype=torch.bool)
    if "weight_version" in batch:
        stale = batch.weight_version != weight_version
    lacking = needs.estimator and batch.lacks_generation_logprobs
    if needs.previous or lacking or stale.any() or not policy.skips_prev_logprobs:
        logprobs = batch.ragged(policy.get_logprobs(batch)["logprobs"])
        if stale.any() and not needs.corrected:
            logprobs = torch.where(batch.by_token(stale), batch.generation_logprobs.to(logprobs.dtype), logprobs)
        batch.prev_logprobs = logprobs
    if needs.reference:
        batch.reference_policy_logprobs = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    return {"stale_samples": int(stale.sum())}
