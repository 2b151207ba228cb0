"""What the critic asks of a value model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypedDict

from nemo_rl_cpp.models.policy.interfaces import TrainedModelInterface

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.models.policy.interfaces import TrainingResult
    from nemo_rl_cpp.models.policy.train_step import Loss
    from nemo_rl_cpp.telemetry.timer import Timer


class ValueOutputSpec(TypedDict):
    """values: float32 [T], or [B, S] of a padded batch: of the state before each token; 0 at first tokens."""

    values: "torch.Tensor"


class ValueInterface(TrainedModelInterface, Protocol):
    """A value model in training. Batches are those of `PolicyInterface`."""

    def prepare_for_inference(self) -> None:
        """Called before `get_values`."""

    def get_values(self, data: Mapping[str, object], timer: "Timer | None" = None) -> Mapping[str, object]:
        """{"values": float32 [T] or [B, S]}: of the state before each token; 0 where nothing is trained."""

    def finish_inference(self) -> None:
        """Called after `get_values`."""

    def prepare_for_training(self) -> None:
        """Called before `train`."""

    def train(self, data: Mapping[str, object], loss_fn: "Loss", *, timer: "Timer | None" = None) -> "TrainingResult":
        """One pass over the batch towards its `returns`, one optimizer step a global batch.

        Returns {"loss": [global batches], "grad_norm": [global batches], "all_mb_metrics": name -> one value a micro-batch}.
        """

    def finish_training(self) -> None:
        """Called after `train`."""
