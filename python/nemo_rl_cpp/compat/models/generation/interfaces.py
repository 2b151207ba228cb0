"""NeMo RL's contract of a generation engine, with the calls by which weights would be moved to other processes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired

from nemo_rl_cpp.config.engines import ColocatedConfig as ColocationConfig
from nemo_rl_cpp.config.engines import ResourcesConfig as OptionalResourcesConfig
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.models.generation import interfaces as house
from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict


class GenerationOutputSpec(house.GenerationOutputSpec):
    """What `generate` gives; routes of experts come from engines of such models."""

    routed_experts: "NotRequired[torch.Tensor]"
    r3_routed_experts_missing_routes: "NotRequired[torch.Tensor]"
    r3_routed_experts_expected_routes: "NotRequired[torch.Tensor]"
    r3_routed_experts_actual_routes: "NotRequired[torch.Tensor]"


@dataclass
class GenerationSamplingParams:
    """How the next token is drawn. top_k None (or -1) and top_p 1 leave the distribution whole."""

    temperature: float
    top_p: float
    top_k: int | None

    @classmethod
    def from_generation_config(cls, generation_config: "GenerationConfig") -> "GenerationSamplingParams":
        """The training values of a generation section."""
        return cls(generation_config["temperature"], generation_config["top_p"], generation_config["top_k"])


def verify_right_padding(
    data: "BatchedDataDict[GenerationDatumSpec] | BatchedDataDict[GenerationOutputSpec]",
    pad_value: int = 0,
    raise_error: bool = True,
) -> tuple[bool, str | None]:
    """Whether every row holds only `pad_value` behind its length: (True, None) or (False, what is wrong).

    Reads input_ids with input_lengths, or output_ids with unpadded_sequence_lengths. With `raise_error` a fault is a
    ValueError.
    """
    fault = _padding_fault(data, pad_value)
    if fault is not None and raise_error:
        raise ValueError(fault)
    return fault is None, fault


def _padding_fault(data: Mapping[str, Any], pad_value: int) -> str | None:
    import torch

    if "input_ids" in data and "input_lengths" in data:
        ids, lengths = data["input_ids"], data["input_lengths"]
    elif "output_ids" in data and ("unpadded_sequence_lengths" in data or "generation_lengths" in data):
        ids = data["output_ids"]
        lengths = data.get("unpadded_sequence_lengths", data.get("generation_lengths"))
    else:
        return ("expected input_ids with input_lengths, or output_ids with unpadded_sequence_lengths, "
                f"but the keys are {list(data)}")  # fmt: skip
    if ids.dim() != 2:
        return f"expected token ids of shape [B, S], got {tuple(ids.shape)}"
    longer = (lengths > ids.shape[1]).nonzero().flatten().tolist()
    if longer:
        return f"row {longer[0]} claims {int(lengths[longer[0]])} tokens, but rows have {ids.shape[1]}"
    behind = torch.arange(ids.shape[1], device=ids.device) >= lengths.to(ids.device).unsqueeze(1)
    wrong = (behind & (ids != pad_value)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        return (f"row {row} is not padded on the right: behind its {int(lengths[row])} tokens, position {column} holds "
                f"{int(ids[row, column])} instead of {pad_value}")  # fmt: skip
    return None


def should_use_async_rollouts(generation_config: "GenerationConfig | None") -> bool:
    """Whether samples are rolled out each on its own: `use_async_rollouts`, else whether vLLM's async engine is on."""
    if generation_config is None:
        return False
    if generation_config.get("use_async_rollouts") is not None:
        return bool(generation_config["use_async_rollouts"])
    engine: dict[str, Any] = generation_config.get("vllm_cfg") or {}
    return generation_config.get("backend") == "vllm" and bool(engine.get("async_engine"))


class GenerationInterface(ABC):
    """A generation engine. Only what every engine can do is abstract; the rest says that it cannot."""

    reports_finished = False
    """Whether `generate` takes `on_finished`, a callable that is told of responses as they end."""

    @abstractmethod
    def generate(
        self, data: "BatchedDataDict[GenerationDatumSpec]", greedy: bool
    ) -> "BatchedDataDict[GenerationOutputSpec]":
        """A response for every prompt. Greedy: temperature 0, top_k 1."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Makes room and wakes up what generation needs; `tags=["weights"]` or `["kv_cache"]` only that."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Gives back what only generation needs."""

    def shutdown(self) -> bool:
        """Ends the engine. Safe to call twice."""
        return True

    def invalidate_kv_cache(self) -> bool:
        """Forgets cached keys and values; whether there was such a cache."""
        return False

    @property
    def requires_kv_scale_sync(self) -> bool:
        """Whether quantisation scales of the cache come with the weights."""
        return False

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Joins the group that weights are broadcast in."""
        raise _cannot(self, "init_collective")

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Takes the names, shapes and dtypes of the weights to come."""
        raise _cannot(self, "prepare_refit_info")

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """Takes the weights from a process of the same machine."""
        raise _cannot(self, "update_weights_via_ipc_zmq")

    def update_weights_from_collective(self) -> list[Any]:
        """Takes the weights from the group's broadcast."""
        raise _cannot(self, "update_weights_from_collective")

    def get_collective_sender_spec(self) -> Any:
        """How a sender must cut the weights."""
        raise _cannot(self, "get_collective_sender_spec")

    def get_inference_world_size(self) -> int | None:
        """Processes of the engine, None if it does not say."""
        return None

    def prepare_nccl_reshard_refit_info(self, refit_info: dict) -> None:
        """Prepares a resharding refit."""
        raise _cannot(self, "prepare_nccl_reshard_refit_info")

    def nccl_reshard_refit(self) -> list[Any]:
        """Takes the weights by resharding."""
        raise _cannot(self, "nccl_reshard_refit")

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        """Watches the engines of a fleet."""
        raise _cannot(self, "attach_fleet_health")

    def blocks_training(self) -> bool:
        """Whether training must wait while the engine generates."""
        return True

    def wake_carries_weight_updates(self) -> bool:
        """Whether waking up brings new weights along."""
        return False

    def clear_logger_metrics(self) -> None:
        """Forgets the metrics gathered for the logger."""

    def get_logger_metrics(self) -> dict[str, Any]:
        """Metrics gathered for the logger."""
        return {}


def _cannot(engine: GenerationInterface, method: str) -> NotImplementedError:
    return NotImplementedError(f"{type(engine).__name__} has no {method}: it takes its weights another way")
