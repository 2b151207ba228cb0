"""Sections of `policy.generation` that steer NeMo RL's engines and its weight transfer; the native engine reads few of their keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from .base import Int, Positive, Real, Section, key, no_effect, only, section

FOREIGN_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""NeMo RL's names in policy.generation.backend: an engine is an implementation, not a result, so the native one stands in."""

_FOLDED = "how the engine is cut, not what it computes: folded onto one device, see cluster.strict_sizes"
_NO_QUANTISATION = "quantised generation is not supported, it changes results"


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Other names that vLLM takes for its types."""


class VllmConfig(Section):
    """Settings of vLLM. With `python` or `server_url`, and backend vllm, vLLM itself generates (docs/vllm.md); else the trainer's own
    engine stands in for it, and reads max_model_len and enforce_eager."""

    python: str | None = key(
        None,
        "the interpreter of an environment that has vLLM: with backend vllm, vLLM itself generates, in a process of that interpreter; null: "
        "the trainer's own engine stands in for vLLM",
    )
    server_url: str | None = key(
        None,
        "http://host:port of a vLLM server that is there: with backend vllm, it generates, and each refit brings it the weights "
        "(docs/vllm.md has the command that starts one); null: none",
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = key(
        600.0, "with python: seconds that vLLM may take to load, after which the run ends"
    )
    timeout_s: Annotated[float, Field(gt=0)] = key(
        300.0,
        "with python or server_url: seconds that a step of vLLM, or a call of a refit, may take, after which the run ends",
    )

    max_model_len: Positive | None = key(
        None, "longest sequence; null: policy.max_total_sequence_length (alias: policy.generation.max_model_len)"
    )
    async_engine: bool = no_effect(False)
    precision: str | None = key(
        None,
        "with python: what vLLM computes in (null: policy.precision); with server_url: what it must compute in (null: anything); else the engine computes in policy.precision; fp8 and other quantised "
        "values are errors",
    )
    kv_cache_dtype: str = key(
        "auto", "keys and values are kept in policy.precision; fp8 and other quantised values are errors"
    )
    is_mx: bool = only(False, why=_NO_QUANTISATION)
    quant_cfg: object = only(None, why=_NO_QUANTISATION)
    logprobs_mode: str = no_effect("processed_logprobs")
    tensor_parallel_size: Positive = key(1, _FOLDED)
    pipeline_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    data_parallel_size: Positive = key(1, _FOLDED)
    enable_expert_parallel: bool = no_effect(False)
    gpu_memory_utilization: Real = no_effect(0.6)
    enforce_eager: bool = key(
        False,
        "on a GPU: true launches a decode step kernel by kernel instead of as a CUDA graph; the same results. With python: handed to vLLM, "
        "which compiles the model where it is false",
    )
    use_tqdm: bool = no_effect(True)
    use_deep_gemm: bool = no_effect(False)
    refit_with_reload_api: bool = no_effect(False)
    refit_prequantize: bool = no_effect(False, "nothing is quantised")
    quantization_ignored_layer_kws: list | None = no_effect(None, "nothing is quantised")
    sync_dp_load_balancing: str | None = no_effect(None)
    num_last_layers_in_bf16: Int = no_effect(0)
    num_first_layers_in_bf16: Int = no_effect(0)
    enable_vllm_metrics_logger: bool = no_effect(True)
    vllm_metrics_logger_interval: Real = no_effect(0.5)
    load_format: str | None = no_effect(None)
    skip_tokenizer_init: bool | None = no_effect(None)
    http_refit_api_key_env_var: str | None = key(
        None, "with server_url: environment variable that holds the server's key; else not read"
    )
    reset_encoder_cache_after_weight_update: bool = no_effect(False)
    http_refit_server_port: Int | None = no_effect(None)
    enable_prefix_caching: bool | None = key(
        None,
        "with python: handed to vLLM (null: vLLM's own default); else a prompt is always computed once for its group",
    )
    env_vars: dict[str, object] | None = key(
        None, "with python: environment variables of vLLM's process (null takes one away); else not read"
    )
    http_server_serving_chat_kwargs: dict[str, object] | None = no_effect(None)
    reasoning_parser_plugin: str | None = no_effect(None)
    compilation_config: dict[str, object] | None = no_effect(None)
    zmq_refit_server_port: Int | None = no_effect(None)

    def dtype_for(self, precision: str) -> str:
        """The type that vLLM computes in, by its whole name, where the model has `precision`."""
        wanted = precision if self.precision in (None, "auto") else self.precision
        return _DTYPES.get(wanted, wanted)


class ResourcesConfig(Section):
    """How many of the cluster's workers only generate, when it is not colocated; they are taken out of those that train."""

    gpus_per_node: Positive | None = key(
        None, "cluster.num_nodes 1: how many of its workers; several nodes: null, or cluster.gpus_per_node"
    )
    num_nodes: Positive | None = key(None, "cluster.num_nodes above 1: how many nodes; one node: 1 or null")


class ColocatedConfig(Section):
    """Whether generation shares the trainer's device and weights."""

    enabled: bool = key(
        True,
        "false: with cluster.executor processes or ray generation has workers and weights of its own (resources), to which each step's weights are sent; with auto it shares the trainer's device all the same, see cluster.strict_sizes",
    )
    resources: ResourcesConfig = section(ResourcesConfig, "workers when not colocated")


class NixlConfig(Section):
    """Weight transfer between machines; weights are shared here."""

    update_weights_bucket_memory_ratio: Real = no_effect(0.05)
    device: str = no_effect("cuda")
    backend_name: str = no_effect("UCX")
    backend_init_params: object = no_effect(None)
    release_after_refit: bool = no_effect(False)
    shard_expert_weights: bool = no_effect(False)


class RefitConfig(Section):
    """Weight transfer of NeMo RL."""

    nixl: NixlConfig = section(NixlConfig, "transfer by NIXL")


class McoreGenerationConfig(Section):
    """Megatron's generation engine; not read by the native engine, so that further keys are accepted."""

    model_config = ConfigDict(extra="allow")

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
    expose_http_server: bool = only(False, why="the policy's server is policy.generation.expose_http_server")
