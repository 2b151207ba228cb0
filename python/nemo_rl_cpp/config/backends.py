"""`dtensor_cfg` and `megatron_cfg`: NeMo RL's training backends.

The native trainer stands in for both. Which one is enabled decides where optimizer, schedule, gradient clipping,
activation checkpointing and parallel sizes are read from; the rest makes no difference here.
"""

from __future__ import annotations

from typing import Literal

from .base import Fraction, Int, Positive, Real, Section, key, no_effect, only, section
from .lora import LoraConfig
from .optimizer import MegatronOptimizerConfig, MegatronSchedulerConfig

_NO_PEFT = "Megatron's adapters (one A for q, k and v together) are not supported: set megatron_cfg.enabled=false, dtensor_cfg.enabled=true and dtensor_cfg.lora_cfg.enabled=true, which gives each matrix an adapter of its own"
_OFFLOAD = "on a CPU everything lies in its memory anyway; an error with cluster.device cuda"
_FOLDED = "how the model is cut, not what is computed: folded onto one device, see cluster.strict_sizes"
_TENSOR = "slices of each layer's heads, of its MLP and of the vocabulary, one a process of cluster.executor processes or ray, whose number it must divide; else folded, see cluster.strict_sizes"
_ONE_DEVICE = "on one device it makes no difference"
_NO_EXPERTS = "no mixture of experts"
_NO_MTP = "multi-token prediction is not supported"


class DTensorConfig(Section):
    """The PyTorch backend of NeMo RL. When enabled, policy.optimizer, scheduler and max_grad_norm are effective."""

    enabled: bool = key(True, "read optimizer, scheduler and max_grad_norm beside this section")
    v2: bool = no_effect(True, alias="_v2")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass: less memory, more time")
    tensor_parallel_size: Positive = key(1, _TENSOR)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    cpu_offload: bool = no_effect(False, _OFFLOAD)
    sequence_parallel: bool = no_effect(False, _ONE_DEVICE)
    custom_parallel_plan: object = no_effect(None, _ONE_DEVICE)
    automodel_kwargs: dict[str, object] = no_effect({})
    lora_cfg: LoraConfig = section(LoraConfig, "LoRA: low-rank adapters instead of all weights")
    moe_parallelizer: dict[str, object] | None = no_effect(None, _NO_EXPERTS)
    model_save_format: str | None = no_effect("safetensors", "checkpoints are always whole Hugging Face folders")
    save_consolidated: object = no_effect("false", "checkpoints are always whole Hugging Face folders")
    single_rank_consolidation: bool = no_effect(False, "checkpoints are always whole Hugging Face folders")
    consolidation_timeout_minutes: Int = no_effect(30, "checkpoints are always whole Hugging Face folders")
    env_vars: dict[str, object] | None = no_effect(None)
    clear_cache_every_n_steps: Int | None = no_effect(None)

    @property
    def is_active(self) -> bool:
        return self.enabled


class MegatronCheckpointConfig(Section):
    """How Megatron writes checkpoints."""

    async_save: bool = no_effect(True)
    ckpt_assume_constant_structure: bool = no_effect(True)


class PeftConfig(Section):
    """LoRA of the Megatron backend."""

    enabled: bool = only(False, why=_NO_PEFT)
    target_modules: list[str] = no_effect([])
    exclude_modules: list[str] = no_effect([])
    dim: Int = no_effect(8)
    alpha: Int = no_effect(32)
    dropout: Fraction = no_effect(0.0)
    dropout_position: str = no_effect("post")
    lora_A_init_method: str = no_effect("xavier")
    lora_B_init_method: str = no_effect("zero")
    a2a_experimental: bool = no_effect(False)
    lora_dtype: str | None = no_effect("None")


class DDPConfig(Section):
    """Gradient exchange of Megatron: read where that backend is enabled, and `overlap_grad_reduce` and
    `data_parallel_sharding_strategy` of the model itself are null."""

    grad_reduce_in_fp32: bool = no_effect(False, "gradients are accumulated in fp32")
    overlap_grad_reduce: bool = key(
        True, "several processes: gradients are added over them while the backward goes on, else after it"
    )
    overlap_param_gather: bool = no_effect(True)
    use_custom_fsdp: bool = key(False, "read data_parallel_sharding_strategy; false: optim")
    average_in_collective: bool = no_effect(True)
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = key(
        "optim_grads_params",
        "with use_custom_fsdp, what several processes share out: no_shard and optim: optimizer state and master weights (ZeRO-1); optim_grads and optim_grads_params: gradients too (ZeRO-2); each process has all weights in every case",
    )


class Fp8Config(Section):
    """FP8 training of Megatron."""

    enabled: bool = only(False, why="FP8 is not supported; use policy.precision bfloat16 or float32")
    fp8: str = no_effect("e4m3")
    fp8_recipe: str = no_effect("blockwise")
    fp8_param: bool = no_effect(False)


class MegatronConfig(Section):
    """The Megatron backend of NeMo RL. When enabled, its optimizer and scheduler sections are effective."""

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
    model_overrides: dict[str, object] = only({}, why="change the model by policy.hf_config_overrides")
    converter_type: str | None = no_effect(None)
    use_fused_linear_logprobs: bool = no_effect(False, "the LM head always runs in chunks")
    fused_linear_logprobs_chunk_size: Int = no_effect(256)
    force_reconvert_from_hf: bool = no_effect(False)
    empty_unused_memory_level: Int = no_effect(1)
    cuda_graph_impl: str = no_effect("none")
    cuda_graph_modules: list = no_effect([])
    cuda_graph_scope: str | list | None = no_effect(None)
    cuda_graph_warmup_steps: Int = no_effect(3)
    fine_grained_activation_offloading: bool = no_effect(False, _OFFLOAD)
    offload_modules: list | None = no_effect(None)
    recompute_granularity: str | None = no_effect("full")
    recompute_modules: list | None = no_effect(None)
    recompute_num_layers: Int | None = no_effect(None)
    recompute_method: str | None = no_effect(None)
    num_layers_in_first_pipeline_stage: Int | None = no_effect(None, _ONE_DEVICE)
    num_layers_in_last_pipeline_stage: Int | None = no_effect(None, _ONE_DEVICE)
    virtual_pipeline_model_parallel_size: Int | None = no_effect(None, _ONE_DEVICE)
    account_for_embedding_in_pipeline_split: bool = no_effect(False, _ONE_DEVICE)
    account_for_loss_in_pipeline_split: bool = no_effect(False, _ONE_DEVICE)
    pipeline_model_parallel_layout: object = no_effect(None, _ONE_DEVICE)
    dynamic_context_parallel: dict[str, object] | None = no_effect(None, _ONE_DEVICE)
    pipeline_dtype: str | None = no_effect(None)
    sequence_parallel: bool = no_effect(False, _ONE_DEVICE)
    freeze_moe_router: bool = key(
        True,
        "backend hf trains the router of a model with experts all the same, and says so; the native core has no experts",
    )
    moe_router_dtype: str | None = no_effect("fp64", _NO_EXPERTS)
    moe_router_load_balancing_type: str = no_effect("none", _NO_EXPERTS)
    moe_router_bias_update_rate: Real = no_effect(0.0, _NO_EXPERTS)
    moe_router_enable_expert_bias: bool = no_effect(False, _NO_EXPERTS)
    moe_router_fusion: bool = no_effect(False, _NO_EXPERTS)
    moe_aux_loss_coeff: Real = no_effect(0.0, _NO_EXPERTS)
    moe_grouped_gemm: bool = no_effect(True, _NO_EXPERTS)
    moe_permute_fusion: bool = no_effect(True, _NO_EXPERTS)
    moe_per_layer_logging: bool = no_effect(False, _NO_EXPERTS)
    track_moe_metrics: bool = no_effect(False, _NO_EXPERTS)
    moe_enable_deepep: bool = no_effect(False, _NO_EXPERTS)
    moe_flex_dispatcher_backend: str | None = no_effect(None, _NO_EXPERTS)
    moe_hybridep_num_sms: Int | None = no_effect(None, _NO_EXPERTS)
    moe_hybridep_prepad_packed_inputs: bool = no_effect(False, _NO_EXPERTS)
    moe_token_dispatcher_type: str = no_effect("alltoall", _NO_EXPERTS)
    moe_shared_expert_overlap: bool = no_effect(False, _NO_EXPERTS)
    batch_invariant_mode: object = no_effect(False, "results never depend on the batch here")
    apply_rope_fusion: bool = no_effect(True)
    bias_activation_fusion: bool = no_effect(True)
    gradient_accumulation_fusion: bool = no_effect(False)
    use_fused_weighted_squared_relu: bool = no_effect(False)
    defer_fp32_logits: bool = no_effect(False)
    use_gloo_process_groups: bool = no_effect(False)
    mtp_num_layers: Int = only(0, why=_NO_MTP)
    mtp_loss_scaling_factor: Real = no_effect(0.0)
    mtp_use_repeated_layer: bool = no_effect(False)
    mtp_detach_heads: bool = no_effect(False)
    env_vars: dict[str, object] | None = no_effect(None)

    @property
    def is_active(self) -> bool:
        return self.enabled


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
