"""What the critic asks of a value model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from nemo_rl_cpp.models.policy.interfaces import TrainedModelInterface

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.telemetry.timer import Timer


class ValueOutputSpec(TypedDict):
    """values: float32 [T], or [B, S] of a padded batch: of the state before each token; 0 at first tokens."""

    values: "torch.Tensor"


class ValueInterface(TrainedModelInterface, Protocol):
    """A value model in training. Batches are those of `PolicyInterface`."""

    def prepare_for_inference(self) -> None:
        """Called before `get_values`."""

    def get_values(self, data: Mapping[str, Any], timer: "Timer | None" = None) -> Mapping[str, Any]:
        """{"values": float32 [T] or [B, S]}: of the state before each token; 0 where nothing is trained."""

    def finish_inference(self) -> None:
        """Called after `get_values`."""

    def prepare_for_training(self) -> None:
        """Called before `train`."""

    def train(self, data: Mapping[str, Any], loss_fn: Any, *, timer: "Timer | None" = None) -> dict[str, Any]:
        """One pass over the batch towards its `returns`, one optimizer step a global batch.

        Returns {"loss": [global batches], "grad_norm": [global batches], "all_mb_metrics": name -> one value a micro-batch}.
        """

    def finish_training(self) -> None:
        """Called after `train`."""
