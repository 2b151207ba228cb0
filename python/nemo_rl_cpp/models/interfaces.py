"""The interfaces through which the training loop uses a policy and a value model, in this process or in workers. The
interface of generation is in models/generation/interfaces.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

import torch

from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.train_step import Exactness, Loss


class TrainingResult(TypedDict):
    """The result of `train`.

    loss, grad_norm: float32 [global batches]. all_mb_metrics: name -> one value per micro-batch. packed_tokens: number
    of tokens computed; a shared prompt is counted once. prev_logprobs (policy only): float32 [T], or [B, S] for a
    padded batch, under the weights before the first update. exactness (policy only): comparison of generation's
    log-probabilities with those of the training forward pass; None if nothing was compared.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    all_mb_metrics: dict[str, list[float]]
    packed_tokens: NotRequired[int]
    prev_logprobs: NotRequired[torch.Tensor]
    exactness: NotRequired[Exactness | None]


class TrainedModelInterface(Protocol):
    """A model in training, policy or critic: the methods for monitoring and saving.

    A call that fails raises an error whose message names the cause (a rank, a file, a parameter). Partial results of a
    failed call are discarded.
    """

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""

    def prepare_for_training(self) -> None:
        """Prepare for `train`."""

    def finish_training(self) -> None:
        """Release the resources that only `train` needs."""

    def save_checkpoint(
        self, weights_path: Path, optimizer_path: Path | None = None, *, checkpointing_cfg: object = None
    ) -> None:
        """Save the model and the tokenizer in Hugging Face format to `weights_path`, and the remaining state that a
        bit-identical resume needs to `optimizer_path`. Neither folder exists before the call."""

    def checkpoint_bytes(self, optimizer: bool) -> int:
        """Return the bytes of the tensors that `save_checkpoint` writes, with or without the optimizer's tensors."""

    def non_finite_parameters(self) -> list[str]:
        """Return the names of the parameters that contain an infinity or NaN."""

    def keep_bad_batches(self, folder: Path) -> None:
        """Save any batch whose loss or gradient is not finite to `folder` before the error is raised."""


class PolicyInterface(TrainedModelInterface, Protocol):
    """A language model in training.

    The version of the weights is the number of `train` calls of the run. The loop passes a `TrainBatch`: B samples, T
    tokens in total. Its attributes are ragged: `input_ids` int64 [T], `offsets` int64 [B + 1], `token_mask` [T],
    `sample_mask` [B]. As a mapping it is padded: `input_ids` int64 [B, S], `input_lengths` [B]. Results may use either.
    """

    @property
    def skips_prev_logprobs(self) -> bool:
        """Whether generation's log-probabilities are exactly those of the first training forward pass, so that the loop
        need not score a batch before training on it."""

    def prepare_for_lp_inference(self) -> None:
        """Prepare for `get_logprobs` and `get_reference_policy_logprobs` of a step."""

    def get_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"logprobs": float32 [T] or [B, S]}: each token's log-probability given the preceding tokens, under
        the current weights and generation's temperature and filters; 0 at untrained tokens and at first tokens."""

    def get_reference_policy_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"reference_logprobs": float32 [T] or [B, S]}, computed like `get_logprobs`, but under the frozen
        initial weights and without filters."""

    def get_entropies(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"entropies": float32 [T] or [B, S]}: the entropy in nats of the distribution that each token was drawn
        from, under the current weights and without filters; 0 at untrained tokens. Called only with a
        `top_entropy_quantile` below 1."""

    def get_sum_pi_squared(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"sum_pi_squared": float32 [T] or [B, S]}: the sum of squared probabilities over the vocabulary at each
        token, under the current weights and without filters; 0 at untrained tokens. Called only for the estimator
        optimal_token_baseline."""

    def get_teacher_logprobs(self, data: Mapping[str, object], teacher: str) -> Mapping[str, object]:
        """Return {"teacher_logprobs": float32 [T] or [B, S]}, computed like `get_reference_policy_logprobs`, but under
        the weights of the model `teacher`. Called only in runs with teachers."""

    def get_topk_logprobs(self, data: RaggedBatch, k: int, teacher: str | None = None) -> Mapping[str, torch.Tensor]:
        """Return {"ids": int64 [T, k], "logprobs": float32 [T, k]}: the likeliest tokens at each trained token under the
        policy or the model `teacher`, without filters; 0 at untrained tokens. If the data has `candidate_ids` [T, k],
        these are scored instead. Called only with `distillation.topk_logits_k`."""

    def train(self, data: Mapping[str, object], loss_fn: Loss, *, timer: Timer | None = None) -> TrainingResult:
        """Train on the batch once, with one optimizer step per global batch. The engine's weights are stale afterwards.

        Return {"loss", "grad_norm": [global batches], "all_mb_metrics": name -> one value per micro-batch,
        "prev_logprobs": float32 [T] or [B, S] under the weights before the first update}.
        """

    def weight_digest(self) -> str:
        """Return a string that is equal for equal weights, to compare the weights of generation and training."""

    def create_generation(self, generation_config: GenerationConfig, *, seed: int) -> GenerationInterface:
        """Create an engine that generates with this policy's weights."""

    def performance(self) -> dict[str, float]:
        """Return performance numbers of the last step, logged as `performance/<name>`; may be empty."""


class ValueInterface(TrainedModelInterface, Protocol):
    """A value model in training. It takes the same batches as `PolicyInterface`."""

    def prepare_for_inference(self) -> None:
        """Prepare for `get_values`."""

    def get_values(self, data: Mapping[str, object], timer: Timer | None = None) -> Mapping[str, object]:
        """Return {"values": float32 [T] or [B, S]}: the value of the state before each token; 0 at untrained tokens."""

    def finish_inference(self) -> None:
        """Release the resources that only `get_values` needs."""

    def train(self, data: Mapping[str, object], loss_fn: Loss, *, timer: Timer | None = None) -> TrainingResult:
        """Fit the values to the batch's `returns` in one pass, with one optimizer step per global batch.

        Return {"loss", "grad_norm": [global batches], "all_mb_metrics": name -> one value per micro-batch}.
        """
