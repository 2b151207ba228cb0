"""The interfaces of policy and critic that the training loop calls, whether the model runs in this process or in
workers. The interface of generation engines is in models/generation/interfaces.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

import torch

from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.train_step import Exactness, Loss


class TrainingResult(TypedDict):
    """The result of `train`.

    loss, grad_norm: float32, one value per global batch.
    all_mb_metrics: maps the name of a metric to its values, one per micro-batch.
    packed_tokens: number of tokens in the forward passes; a prompt that several samples share is counted once.
    prev_logprobs (policy only): float32 [T], or [B, S] for a padded batch: log-probabilities under the weights before
        the first update.
    exactness (policy only): comparison of generation's log-probabilities with those of the training forward pass;
        None if nothing was compared."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    all_mb_metrics: dict[str, list[float]]
    packed_tokens: NotRequired[int]
    prev_logprobs: NotRequired[torch.Tensor]
    exactness: NotRequired[Exactness | None]


class TrainedModelInterface(Protocol):
    """A model in training, policy or critic: methods for monitoring and saving. The error of a failed call names the
    cause (a rank, a file, a parameter), and partial results are discarded."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next optimizer step."""

    def save_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        """Save model and tokenizer in Hugging Face format in the folder `weights_path`, and in `optimizer_path` (unless
        None) all other state for a bit-identical resume. Neither folder exists before the call."""

    def checkpoint_bytes(self, optimizer: bool) -> int:
        """Return the bytes of the tensors that `save_checkpoint` writes, with those of the optimizer if `optimizer`."""

    def non_finite_parameters(self) -> list[str]:
        """Return the names of the parameters that contain an infinity or NaN."""

    def keep_bad_batches(self, folder: Path) -> None:
        """From now on, save any batch whose loss or gradient is not finite to `folder` before raising the error."""


class PolicyInterface(TrainedModelInterface, Protocol):
    """A language model in training.

    Its weight version counts the `train` calls of the run. The loop passes a `TrainBatch` of B samples with T tokens in
    total, whose attributes are ragged tensors: `input_ids` int64 [T], `offsets` int64 [B + 1], `token_mask` [T],
    `sample_mask` [B]. Read as a mapping, it has padded tensors: `input_ids` int64 [B, S], `input_lengths` [B]. Results
    may be ragged or padded."""

    @property
    def skips_prev_logprobs(self) -> bool:
        """Return whether generation's log-probabilities equal those of the first training forward pass bit for bit. If
        so, the loop does not score a batch before training on it."""

    def get_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"logprobs": float32 [T] or [B, S]}: each token's log-probability given the preceding tokens, under
        the current weights with generation's temperature, top-k and top-p; 0 at untrained and first tokens."""

    def get_reference_policy_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"reference_logprobs": float32 [T] or [B, S]}, computed like `get_logprobs`, but under the frozen
        initial weights and without top-k and top-p."""

    def get_entropies(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"entropies": float32 [T] or [B, S]}: the entropy in nats of the distribution of each token, under the
        current weights without top-k and top-p; 0 at untrained tokens. Called only if top_entropy_quantile < 1."""

    def get_sum_pi_squared(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"sum_pi_squared": float32 [T] or [B, S]}: the sum of squared probabilities under the current weights,
        without top-k and top-p; 0 at untrained tokens. Used by the estimator optimal_token_baseline."""

    def get_teacher_logprobs(self, data: Mapping[str, object], teacher: str) -> Mapping[str, object]:
        """Return {"teacher_logprobs": float32 [T] or [B, S]}, computed like `get_reference_policy_logprobs`, but under
        the weights of the model `teacher`. Called only in runs with teachers."""

    def get_topk_logprobs(self, data: RaggedBatch, k: int, teacher: str | None = None) -> Mapping[str, torch.Tensor]:
        """Return {"ids": int64 [T, k], "logprobs": float32 [T, k]}: the k most likely tokens at each trained token,
        under the policy or the model `teacher`, without top-k and top-p; 0 at untrained tokens. If the data has
        `candidate_ids` [T, k], return these ids and their log-probabilities. Called only with
        `distillation.topk_logits_k`."""

    def train(self, data: Mapping[str, object], loss_fn: Loss) -> TrainingResult:
        """Train on the batch once, with one optimizer step per global batch, which makes the engine's weights stale."""

    def weight_digest(self) -> str:
        """Return a digest of the weights, used to check that generation and training use equal weights."""

    def create_generation(self, generation_config: GenerationConfig, *, seed: int) -> GenerationInterface:
        """Create an engine that generates with this policy's weights."""

    def performance(self) -> dict[str, float]:
        """Return performance metrics of the last step, logged as `performance/<name>`; may be empty."""


class ValueInterface(TrainedModelInterface, Protocol):
    """A critic in training. It takes the same batches as `PolicyInterface`."""

    def get_values(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"values": float32 [T] or [B, S]}: the value of the state before each token; 0 at untrained tokens."""

    def train(self, data: Mapping[str, object], loss_fn: Loss) -> TrainingResult:
        """Fit the values to the batch's `returns` in one pass, with one optimizer step per global batch."""
