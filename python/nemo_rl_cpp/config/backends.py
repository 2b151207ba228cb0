"""`dtensor_cfg` and `megatron_cfg`: NeMo RL's training backends.

The native trainer stands in for both. Which one is enabled decides where optimizer, schedule, gradient clipping,
activation checkpointing and parallel sizes are read from; the rest makes no difference here.
"""

from typing import Literal

from .base import Positive, Section, key, section
from .lora import LoraConfig
from .optimizer import MegatronOptimizerConfig, MegatronSchedulerConfig

_FOLDED = "how the model is cut, not what is computed: folded onto one device, see cluster.strict_sizes"
_TENSOR = "slices of each layer's heads, of its MLP and of the vocabulary, one a process of cluster.executor processes or ray, whose number it must divide; else folded, see cluster.strict_sizes"


class DTensorConfig(Section):
    """The PyTorch backend of NeMo RL. When enabled, policy.optimizer, scheduler and max_grad_norm are effective."""

    is_switched = True
    enabled: bool = key(True, "read optimizer, scheduler and max_grad_norm beside this section")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    tensor_parallel_size: Positive = key(1, _TENSOR)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    lora_cfg: LoraConfig = section(LoraConfig, "LoRA: low-rank adapters instead of all weights")


class MegatronCheckpointConfig(Section):
    """How Megatron writes checkpoints."""


class PeftConfig(Section):
    """LoRA of the Megatron backend."""


class DDPConfig(Section):
    """Gradient exchange of Megatron: read where that backend is enabled, and `overlap_grad_reduce` and
    `data_parallel_sharding_strategy` of the model itself are null."""

    overlap_grad_reduce: bool = key(
        True, "several processes: gradients are added over them while the backward goes on, else after it"
    )
    use_custom_fsdp: bool = key(False, "read data_parallel_sharding_strategy; false: optim")
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = key(
        "optim_grads_params",
        "with use_custom_fsdp, what several processes share out: no_shard and optim: optimizer state and master weights (ZeRO-1); optim_grads and optim_grads_params: gradients too (ZeRO-2); each process has all weights in every case",
    )


class Fp8Config(Section):
    """FP8 training of Megatron."""


class MegatronConfig(Section):
    """The Megatron backend of NeMo RL. When enabled, its optimizer and scheduler sections are effective."""

    is_switched = True
    enabled: bool = key(False, "read optimizer, scheduler and clip_grad from this section")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    tensor_model_parallel_size: Positive = key(1, _TENSOR)
    pipeline_model_parallel_size: Positive = key(1, _FOLDED)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_tensor_parallel_size: Positive = key(1, _FOLDED)
    expert_model_parallel_size: Positive = key(1, _FOLDED)
    optimizer: MegatronOptimizerConfig = section(MegatronOptimizerConfig, "optimizer")
    scheduler: MegatronSchedulerConfig = section(
        MegatronSchedulerConfig, "learning rate and weight decay over the steps"
    )
    checkpoint: MegatronCheckpointConfig = section(
        MegatronCheckpointConfig, "Megatron's checkpoint format, not used here"
    )
    peft: PeftConfig = section(PeftConfig, "Megatron's LoRA (not supported; see dtensor_cfg.lora_cfg)")
    distributed_data_parallel_config: DDPConfig = section(DDPConfig, "gradient exchange")
    fp8_cfg: Fp8Config | None = section(Fp8Config, "FP8 (not supported)")
    freeze_moe_router: bool = key(
        True,
        "backend hf trains the router of a model with experts all the same, and says so; the native core has no experts",
    )


PARALLEL_SIZES = {
    "dtensor_cfg": ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
    "megatron_cfg": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
        "expert_model_parallel_size",
    ),
}
