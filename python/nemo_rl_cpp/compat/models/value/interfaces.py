"""NeMo RL's contract of a value model. What the critic asks is `nemo_rl_cpp.models.interfaces.ValueInterface`."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.compat.models.policy.interfaces import TrainedInterface
from nemo_rl_cpp.models.interfaces import ValueOutputSpec

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec
    from nemo_rl_cpp.telemetry.timer import Timer


class ValueInterface(TrainedInterface):
    """A value model in training."""

    @abstractmethod
    def get_values(
        self, data: "BatchedDataDict[GenerationDatumSpec]", timer: "Timer | None" = None
    ) -> "BatchedDataDict[ValueOutputSpec]":
        """Values for input_ids [B, S]."""

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Makes the weights ready for values."""

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Leaves the device to others after values were computed."""
