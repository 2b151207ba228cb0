"""NeMo RL's contract of a value model. What the critic asks is `nemo_rl_cpp.models.value.interfaces.ValueInterface`."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.models.value.interfaces import ValueOutputSpec

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec
    from nemo_rl_cpp.telemetry.timer import Timer


class ValueInterface(ABC):
    """A value model in training."""

    @abstractmethod
    def get_values(
        self, data: "BatchedDataDict[GenerationDatumSpec]", timer: "Timer | None" = None
    ) -> "BatchedDataDict[ValueOutputSpec]":
        """Values for input_ids [B, S]."""

    @abstractmethod
    def train(
        self,
        data: "BatchedDataDict",
        loss_fn: "LossFunction",
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: "Timer | None" = None,
    ) -> dict[str, Any]:
        """One optimizer step a global batch: {"loss", "grad_norm", "all_mb_metrics"}."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Makes weights, gradients and optimizer state ready on the device."""

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Makes the weights ready for values."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the device to others."""

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the device to others after values were computed."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights and optimizer state."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the model's processes. Safe to call twice."""
