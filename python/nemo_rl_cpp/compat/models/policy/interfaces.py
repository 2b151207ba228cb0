"""NeMo RL's contract of a policy, with the calls by which weights would be moved to other processes.

What the training loop itself asks of a policy is `nemo_rl_cpp.models.interfaces.PolicyInterface`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.algorithms.loss import LossFunction
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec
    from nemo_rl_cpp.telemetry.timer import Timer


class LogprobOutputSpec(TypedDict):
    """logprobs: float32 [T], or [B, S] of a padded batch: of each token given those before it; 0 at first tokens."""

    logprobs: "torch.Tensor"


class ReferenceLogprobOutputSpec(TypedDict):
    """reference_logprobs: as `LogprobOutputSpec.logprobs`, of the reference policy."""

    reference_logprobs: "torch.Tensor"


class ScoreOutputSpec(TypedDict):
    """scores: float32 [B]."""

    scores: "torch.Tensor"


class TopkLogitsOutputSpec(TypedDict):
    """topk_logits float32 and topk_indices int64, both [B, S, k]."""

    topk_logits: "torch.Tensor"
    topk_indices: "torch.Tensor"


class TrainedInterface(ABC):
    """A model in training, whichever it is."""

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
        """Writes weights and optimizer state; a policy its tokenizer, too."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the model's processes. Safe to call twice."""


class PolicyInterface(TrainedInterface):
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

    def get_topk_logits(
        self,
        data: "BatchedDataDict[GenerationDatumSpec]",
        k: int,
        micro_batch_size: int | None = None,
        timer: "Timer | None" = None,
    ) -> "BatchedDataDict[TopkLogitsOutputSpec]":
        """The k largest logits at every position (for distillation)."""
        raise NotImplementedError(f"{type(self).__name__} has no get_topk_logits: distillation is not supported")

    def calibrate_qkv_fp8_scales(
        self,
        data: "BatchedDataDict[GenerationDatumSpec]",
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """Scales for a float8 cache."""
        raise NotImplementedError(f"{type(self).__name__} has no calibrate_qkv_fp8_scales: float8 is not supported")


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that may share its device with a generation engine."""

    @abstractmethod
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Makes the weights ready for log-probabilities."""

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int, nccl_peer: str = "nemo"
    ) -> list[Any]:
        """Joins the group that weights are broadcast in."""
        raise _cannot(self, "init_collective")

    def offload_before_refit(self) -> None:
        """Makes room for the engine: optimizer state leaves the device. Nothing to do where weights are shared."""

    def offload_after_refit(self) -> None:
        """Makes more room: the model leaves the device. Nothing to do where weights are shared."""

    def offload_to_cpu(self) -> None:
        """Everything leaves the device. Nothing to do on a CPU."""

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Name -> (shape, dtype) of the weights, under Hugging Face's names."""
        return None

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int, kv_scales: dict[str, float] | None = None
    ) -> list[Any]:
        """Sends the weights to a process of the same machine."""
        raise _cannot(self, "stream_weights_via_ipc_zmq")

    def stream_weights_via_http(self, rollout_engine_urls: list[str], buffer_size_bytes: int) -> list[Any]:
        """Sends the weights to engines behind HTTP."""
        raise _cannot(self, "stream_weights_via_http")

    def set_rollout_num_gpus_per_engine(self, num_gpus_per_engine: int) -> None:
        """How many devices an engine spans."""
        raise _cannot(self, "set_rollout_num_gpus_per_engine")

    def broadcast_weights_for_collective(
        self,
        kv_scales: dict[str, float] | None = None,
        *,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
    ) -> list[Any]:
        """Broadcasts the weights in the group."""
        raise _cannot(self, "broadcast_weights_for_collective")

    def prepare_nccl_reshard_refit_info(
        self,
        train_parallelism: dict[str, int],
        gen_parallelism: dict[str, int],
        train_world_size: int,
        gen_world_size: int,
    ) -> Any:
        """Prepares a resharding refit."""
        raise _cannot(self, "prepare_nccl_reshard_refit_info")

    def nccl_reshard_refit(self, kv_scales: dict[str, float] | None = None) -> list[Any]:
        """Sends the weights by resharding."""
        raise _cannot(self, "nccl_reshard_refit")


def _cannot(policy: PolicyInterface, method: str) -> NotImplementedError:
    return NotImplementedError(f"{type(policy).__name__} has no {method}: its engine takes the weights another way")
