"""The `policy.generation` section (`generation` in an evaluation)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from .base import Int, Positive, Real, Section, StopStrings, StopTokenIds, Temperature, TopP, key, no_effect, only, section


class VllmConfig(Section):
    """Settings of vLLM. The native engine reads max_model_len and enforce_eager."""

    max_model_len: Positive | None = key(
        None,
        "longest sequence; null: policy.max_total_sequence_length (alias: policy.generation.max_model_len)",
    )
    async_engine: bool = no_effect(False)
    precision: str | None = no_effect(None)
    kv_cache_dtype: str = no_effect("auto")
    logprobs_mode: str = no_effect("processed_logprobs")
    tensor_parallel_size: Int = no_effect(1)
    pipeline_parallel_size: Int = no_effect(1)
    expert_parallel_size: Int = no_effect(1)
    gpu_memory_utilization: Real = no_effect(0.6)
    enforce_eager: bool = key(
        False, "on a GPU: true launches a decode step kernel by kernel instead of as a CUDA graph; the same results"
    )
    use_tqdm: bool = no_effect(True)
    use_deep_gemm: bool = no_effect(False)
    num_last_layers_in_bf16: Int = no_effect(0)
    num_first_layers_in_bf16: Int = no_effect(0)
    enable_vllm_metrics_logger: bool = no_effect(True)
    vllm_metrics_logger_interval: Real = no_effect(0.5)
    load_format: str | None = no_effect(None)
    skip_tokenizer_init: bool | None = no_effect(None)
    http_refit_api_key_env_var: str | None = no_effect(None)
    reset_encoder_cache_after_weight_update: bool = no_effect(False)
    http_refit_server_port: Int | None = no_effect(None)
    zmq_refit_server_port: Int | None = no_effect(None)


class ResourcesConfig(Section):
    """Devices of their own for generation, when it is not colocated."""

    gpus_per_node: Int | None = no_effect(None)
    num_nodes: Int | None = no_effect(None)


class ColocatedConfig(Section):
    """Whether generation shares the trainer's device and weights."""

    enabled: bool = only(True, why="generation shares the trainer's weights; devices of its own are not supported yet")
    resources: ResourcesConfig = section(ResourcesConfig, "devices when not colocated")


class NixlConfig(Section):
    """Weight transfer between machines; weights are shared here."""

    update_weights_bucket_memory_ratio: Real = no_effect(0.05)
    device: str = no_effect("cuda")
    backend_name: str = no_effect("UCX")
    backend_init_params: Any = no_effect(None)
    release_after_refit: bool = no_effect(False)
    shard_expert_weights: bool = no_effect(False)


class RefitConfig(Section):
    """Weight transfer of NeMo RL."""

    nixl: NixlConfig = section(NixlConfig, "transfer by NIXL")


class McoreGenerationConfig(Section):
    """Megatron's generation engine; not read by the native engine."""

    max_model_len: Int | None = no_effect(None)
    cuda_graph_impl: str = no_effect("local")
    inference_cuda_graph_scope: str = no_effect("block")
    buffer_size_gb: Real = no_effect(10)
    buffer_guaranteed_fraction: Real = no_effect(0.1)
    num_cuda_graphs: Int = no_effect(4)
    block_size_tokens: Int = no_effect(256)
    use_cuda_graphs_for_non_decode_steps: bool = no_effect(True)
    enable_chunked_prefill: bool = no_effect(True)
    enable_prefix_caching: bool = no_effect(False)
    unified_memory_level: Int = no_effect(0)
    max_tokens: Int = no_effect(16384)
    kv_cache_management_mode: str = no_effect("persist")
    materialize_only_last_token_logits: bool = no_effect(True)
    num_speculative_tokens: Int = no_effect(0)
    refit_backend: str = no_effect("nccl")
    parsers: list = no_effect([])
    expose_http_server: bool = no_effect(False)


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    backend: Literal["native", "vllm"] = key(
        "native", "native: the engine that shares the trainer's weights; vllm is not supported yet"
    )
    max_new_tokens: Positive | None = key(None, "longest response in tokens; null: policy.max_total_sequence_length")
    temperature: Temperature = key(
        1.0, "sampling temperature (also divides the training logits); 0: greedy, in evaluations only"
    )
    top_p: TopP = key(1.0, "nucleus sampling, in training's log-probabilities too; 1: off")
    top_k: Int | None = key(
        None, "sample among the k likeliest tokens, in training's log-probabilities too; null or -1: off", ge=-1
    )
    val_temperature: Temperature | None = key(None, "temperature in validation; null: temperature")
    val_top_p: TopP | None = key(None, "top_p in validation; null: top_p")
    val_top_k: Int | None = key(None, "top_k in validation; null: top_k", ge=-1)
    stop_token_ids: StopTokenIds | None = key(None, "tokens that end a response; null: the end tokens of the model")
    stop_strings: StopStrings | None = key(None, "texts that end a response; they stay in it")
    kv_cache_gb: Real | None = key(
        None, "memory for keys and values in GB; null: what the largest batch needs, within the free memory", gt=0
    )
    max_batch_size: Positive | None = key(
        None, "responses generated at the same time; null: as many as kv_cache_gb holds"
    )
    prefill_chunk_tokens: Positive = key(2048, "prompt tokens that enter the model at once; smaller saves memory")
    packed_weights: Literal["off", "on", "auto"] = key(
        "auto",
        "on: steps of few texts (up to 12; 2 without bfloat16 instructions) read a copy of bfloat16 weights in 12 bits each, the same bits "
        "(CPU with AVX-512; 1.5 bytes a parameter); auto: once 16 such steps have run since the weights changed; off: never",
    )
    vllm_cfg: VllmConfig = section(VllmConfig, "vLLM's settings; of these max_model_len and enforce_eager are read")
    colocated: ColocatedConfig = section(ColocatedConfig, "whether generation shares the trainer's device")
    refit_cfg: RefitConfig = section(RefitConfig, "weight transfer of NeMo RL, not needed here")
    mcore_generation_config: McoreGenerationConfig = section(McoreGenerationConfig, "Megatron's engine, not used here")
    vllm_kwargs: dict[str, Any] = no_effect({})
    port_range_low: Int = no_effect(3000)
    port_range_high: Int = no_effect(4999)
    refit_transport: str | None = no_effect(None, "weights are shared, nothing is transported")
    real_quant_export_cpu_offload: bool = no_effect(True)
    # set by the program, see models.generation.configure_generation_config
    _pad_token_id: int | None = PrivateAttr(None)
    _mtp_weights_from_refit: bool | None = PrivateAttr(None)
    _debug_payload_metrics: bool | None = PrivateAttr(None)
    bad_words: list[str] | None = only(None, why="forbidden words are not supported")
    use_async_rollouts: bool = no_effect(False)

    def effective_max_model_len(self, max_total_sequence_length: int) -> int:
        """Longest sequence that generation may make: the smaller of vllm_cfg.max_model_len and the trainer's limit."""
        return min(self.vllm_cfg.max_model_len or max_total_sequence_length, max_total_sequence_length)


class EvalVllmConfig(VllmConfig):
    """Settings of vLLM. With the native engine only max_model_len and precision are read."""

    precision: Literal["bfloat16", "float32"] | None = key(None, "of weights and products; null: bfloat16")


class EvalGenerationConfig(GenerationConfig):
    """Generation in an evaluation: with the model, and the number of prompts at a time."""

    model_name: str = key(..., "folder, checkpoint of a run (step_N), packaged model or name on the hub")
    vllm_cfg: EvalVllmConfig = section(EvalVllmConfig, "vLLM's settings; of these max_model_len, enforce_eager and precision are read")
    num_prompts_per_step: Int = key(-1, "prompts generated at a time; -1: all", ge=-1)
    temperature: Temperature = key(0.0, "sampling temperature; 0: greedy")
