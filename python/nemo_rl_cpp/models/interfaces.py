"""What the training loop asks of a policy and of a value model, wherever they run; the contract of generation is beside
them, as the GRPO guide has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

import torch

from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.train_step import Exactness, Loss


class TrainingResult(TypedDict):
    """What `train` gives.

    loss, grad_norm: float32 [global batches]. all_mb_metrics: name -> one value a micro-batch. packed_tokens: how many
    were computed, a shared prompt once. prev_logprobs: float32 [T], or [B, S] of a padded batch, of the weights before
    the first update (a policy's). exactness: generation's log-probabilities against the training forward's (a policy's;
    None where nothing was compared).
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    all_mb_metrics: dict[str, list[float]]
    packed_tokens: NotRequired[int]
    prev_logprobs: NotRequired[torch.Tensor]
    exactness: NotRequired[Exactness | None]


class TrainedModelInterface(Protocol):
    """A model in training, policy or critic: what watching and saving ask of it.

    A call may fail; then it raises, and the message names what failed (a rank, a file, a parameter). Nothing of a failed
    call is kept.
    """

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""

    def prepare_for_training(self) -> None:
        """Prepare for `train`."""

    def finish_training(self) -> None:
        """Give back what only `train` needs."""

    def save_checkpoint(
        self, weights_path: Path, optimizer_path: Path | None = None, *, checkpointing_cfg: object = None
    ) -> None:
        """Make `weights_path` a Hugging Face folder with the tokenizer, and `optimizer_path` a folder of what a bit-identical
        resume needs besides. Neither folder exists before the call."""

    def checkpoint_bytes(self, optimizer: bool) -> int:
        """Return the bytes of the tensors that `save_checkpoint` writes, with or without those of the optimizer."""

    def non_finite_parameters(self) -> list[str]:
        """Return the names of the parameters that hold an infinity or NaN; empty for a healthy model."""

    def keep_bad_batches(self, folder: Path) -> None:
        """Write a batch that makes a loss or gradient non-finite into `folder` before the error is raised."""


class PolicyInterface(TrainedModelInterface, Protocol):
    """A language model in training.

    Weights have a version: it counts the `train` calls of the run. The loop gives a `TrainBatch`, of B samples with T tokens in
    all. Read by attribute it is ragged: `input_ids` int64 [T], `offsets` int64 [B + 1], `token_mask` [T], `sample_mask` [B]; read
    as a mapping it is padded: `batch["input_ids"]` int64 [B, S], `batch["input_lengths"]` [B]. Results may have either layout.
    """

    @property
    def skips_prev_logprobs(self) -> bool:
        """Whether generation's log-probabilities are exactly those of the first training forward, so that the loop need not
        score a batch before it is trained on."""

    def prepare_for_lp_inference(self) -> None:
        """Prepare for `get_logprobs` and `get_reference_policy_logprobs` of a step."""

    def get_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"logprobs": float32 [T] or [B, S]}: the log-probability of each token given those before it, under the present
        weights and generation's temperature and filters; 0 where nothing is trained and at first tokens."""

    def get_reference_policy_logprobs(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return {"reference_logprobs": float32 [T] or [B, S]}: as `get_logprobs`, under the frozen first weights and
        without filters."""

    def get_teacher_logprobs(self, data: Mapping[str, object], teacher: str) -> Mapping[str, object]:
        """Return {"teacher_logprobs": float32 [T] or [B, S]}: as `get_reference_policy_logprobs`, under the teacher of this model
        name. Asked in runs with teachers only."""

    def train(self, data: Mapping[str, object], loss_fn: Loss, *, timer: Timer | None = None) -> TrainingResult:
        """Pass over the batch once, with one optimizer step a global batch.

        Returns {"loss": [global batches], "grad_norm": [global batches], "all_mb_metrics": name -> one value a micro-batch,
        "prev_logprobs": float32 [T] or [B, S] of the weights before the first update}. After the call the engine's weights are old.
        """

    def weight_digest(self) -> str:
        """Return a text that is equal for equal weights, by which generation and training are compared."""

    def create_generation(self, generation_config: GenerationConfig, *, seed: int) -> GenerationInterface:
        """Make an engine that answers with this policy's weights."""

    def performance(self) -> dict[str, float]:
        """Return numbers of how the last step ran, logged as `performance/<name>`; empty where there are none."""


class ValueInterface(TrainedModelInterface, Protocol):
    """A value model in training. Batches are those of `PolicyInterface`."""

    def prepare_for_inference(self) -> None:
        """Prepare for `get_values`."""

    def get_values(self, data: Mapping[str, object], timer: Timer | None = None) -> Mapping[str, object]:
        """Return {"values": float32 [T] or [B, S]}: of the state before each token; 0 where nothing is trained."""

    def finish_inference(self) -> None:
        """Give back what only `get_values` needs."""

    def train(self, data: Mapping[str, object], loss_fn: Loss, *, timer: Timer | None = None) -> TrainingResult:
        """Pass over the batch once towards its `returns`, with one optimizer step a global batch.

        Returns {"loss": [global batches], "grad_norm": [global batches], "all_mb_metrics": name -> one value a micro-batch}.
        """
