"""What the training loop asks of a policy, wherever it runs."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec
    from nemo_rl_cpp.utils.timer import Timer


class LogprobOutputSpec(TypedDict):
    """logprobs: float32 [B, S]; column t is the log-probability of token t given those before it, column 0 is 0."""

    logprobs: "torch.Tensor"


class ReferenceLogprobOutputSpec(TypedDict):
    """reference_logprobs: as `LogprobOutputSpec.logprobs`, of the reference policy."""

    reference_logprobs: "torch.Tensor"


class PolicyInterface(ABC):
    """A model in training."""

    @abstractmethod
    def get_logprobs(
        self, data: "BatchedDataDict[GenerationDatumSpec]", timer: "Timer | None" = None
    ) -> "BatchedDataDict[LogprobOutputSpec]":
        """Log-probabilities of the tokens of input_ids [B, S] under the current weights."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self,
        data: "BatchedDataDict[GenerationDatumSpec]",
        micro_batch_size: int | None = None,
        timer: "Timer | None" = None,
    ) -> "BatchedDataDict[ReferenceLogprobOutputSpec]":
        """Log-probabilities under the reference weights."""

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
        """One optimizer step a global batch: {"loss", "grad_norm", "all_mb_metrics"}. `eval_mode` computes only."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Makes the weights, gradients and optimizer state ready on the device."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Gives back what only training needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights, optimizer state and tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the policy's processes. Safe to call twice."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that may share its device with a generation engine."""

    @abstractmethod
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Makes the weights ready for log-probabilities."""
