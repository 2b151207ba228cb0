"""The log-probabilities that the loss and the advantages need beside the rollout's own."""

from typing import NamedTuple

import torch

from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.experience.batches import TrainBatch
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface


class LogprobNeeds(NamedTuple):
    """What a run needs, by its configuration.

    Attributes:
        reference: the KL weight is not 0.
        previous: always score the batch before training, even where generation's log-probabilities are as good: for
            masking sequences by their error, which must be known before training.
        corrected: the loss corrects samples of older weights by importance sampling, so their `prev_logprobs` are the present
            policy's; else those of the policy that sampled them.
    """

    reference: bool
    previous: bool
    corrected: bool = False

    @classmethod
    def of(cls, loss: ClippedPGLossConfig, loop: LoopConfig) -> "LogprobNeeds":
        """By the sections `loss_fn` (KL in the loss or in the reward) and `grpo` or `ppo`."""
        return cls(
            loss.reference_policy_kl_penalty != 0, loop.seq_logprob_error_threshold is not None, loop.trajectory_age > 0
        )


def add_logprobs(
    policy: PolicyInterface, batch: TrainBatch, needs: LogprobNeeds, weight_version: int
) -> dict[str, float]:
    """Adds `prev_logprobs` and `reference_policy_logprobs` [T] as far as they are needed.

    `prev_logprobs` are left out when the policy takes those of its first training forward (it is exact, see
    `Policy.skips_prev_logprobs`). Samples generated under older weights (`weight_version` is not the current one) keep the
    log-probabilities of the policy that sampled them, unless the loss corrects them. Returns the metric `stale_samples`.
    """
    policy.prepare_for_lp_inference()
    stale = (
        batch.weight_version != weight_version
        if "weight_version" in batch
        else torch.zeros(batch.size, dtype=torch.bool)
    )
    if needs.previous or stale.any() or not policy.skips_prev_logprobs:
        logprobs = batch.ragged(policy.get_logprobs(batch)["logprobs"])
        if stale.any() and not needs.corrected:
            logprobs = torch.where(batch.by_token(stale), batch.generation_logprobs.to(logprobs.dtype), logprobs)
        batch.prev_logprobs = logprobs
    if needs.reference:
        batch.reference_policy_logprobs = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    return {"stale_samples": int(stale.sum())}
