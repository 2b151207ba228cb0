"""The `policy.generation` section (`generation` in an evaluation), with other engines and the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .base import Int, Positive, Real, Section, StopStrings, StopTokenIds, Temperature, TopP, key, section

FOREIGN_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""NeMo RL's names in policy.generation.backend: an engine is an implementation, not a result, so the native one stands in."""

_FOLDED = "how the engine is cut, not what it computes: folded onto one device, see cluster.strict_sizes"


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Other names that vLLM takes for its types."""


class VllmConfig(Section):
    """Settings of vLLM. With `python` or `server_url` and backend vllm, vLLM itself generates (docs/vllm.md). Otherwise
    the trainer's own engine replaces it, and reads max_model_len and enforce_eager."""

    python: str | None = key(
        None,
        "the interpreter of an environment that has vLLM: with backend vllm, the run starts vLLM's server in it, which generates; null: "
        "the trainer's own engine stands in for vLLM",
    )
    server_url: str | None = key(
        None,
        "http://host:port of a vLLM server that runs already: with backend vllm, it generates, and each refit brings it the weights "
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
    precision: str | None = key(
        None,
        "with python: what vLLM computes in (null: policy.precision); with server_url: what it must compute in (null: anything); else the engine computes in policy.precision; fp8 and other quantised "
        "values are errors",
    )
    kv_cache_dtype: str = key(
        "auto", "keys and values are kept in policy.precision; fp8 and other quantised values are errors"
    )
    tensor_parallel_size: Positive = key(1, _FOLDED)
    pipeline_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    data_parallel_size: Positive = key(1, _FOLDED)
    enforce_eager: bool = key(
        False,
        "on a GPU: true launches a decode step kernel by kernel instead of as a CUDA graph; the same results. With python: handed to vLLM, "
        "which compiles the model where it is false",
    )
    http_refit_api_key_env_var: str | None = key(
        None, "with server_url: environment variable that holds the server's key; else not read"
    )
    enable_prefix_caching: bool | None = key(
        None,
        "with python: handed to vLLM (null: vLLM's own default); else a prompt is always computed once for its group",
    )
    env_vars: dict[str, object] | None = key(
        None, "with python: environment variables of vLLM's server (null takes one away); else not read"
    )

    def dtype_for(self, precision: str) -> str:
        """Return the full name of the type that vLLM computes in, for a model of this precision."""
        wanted = precision if self.precision in (None, "auto") else self.precision
        return _DTYPES.get(wanted, wanted)


class ResourcesConfig(Section):
    """How many of the cluster's workers only generate if generation is not colocated; these workers do not train."""

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
    """Weight transfer between machines. This package ignores it."""


class RefitConfig(Section):
    """Weight transfer of NeMo RL."""

    nixl: NixlConfig = section(NixlConfig, "transfer by NIXL")


class McoreGenerationConfig(Section):
    """Megatron's generation engine. The native engine does not read it, so further keys are accepted."""

    model_config = ConfigDict(extra="allow")


EXPOSED = "policy.generation.expose_http_server"
PACKAGES = ("starlette", "uvicorn")


class HttpServerConfig(Section):
    """The address and the limits of the policy's HTTP server; read if expose_http_server is set."""

    host: str = key("127.0.0.1", "address to listen at; the default is reached from this machine only", min_length=1)
    port: Int = key(0, "0: a free one, which is printed", ge=0, le=65535)
    api_key_variable: str | None = key(
        None,
        "environment variable with the key that requests must carry; null: a new key for each run, which agents are told",
    )
    max_queue: Positive = key(1024, "answers under way or waiting; more are refused with status 503")
    max_batch_size: Positive = key(64, "answers that the server generates at the same time")
    max_body_mb: Real = key(8.0, "size of a request in MiB", gt=0)
    request_timeout_s: Real = key(600.0, "seconds for an answer, the wait for new weights included", gt=0)


class GenerationConfig(Section):
    """How responses are sampled, and by which engine."""

    spellings = {"max_model_len": "vllm_cfg.max_model_len", "vllm_cfg.expose_http_server": "expose_http_server"}
    backend: Literal["native", "hf", "vllm", "sglang", "megatron", "trtllm", "dynamo"] | None = key(
        None,
        "native: the C++ engine; hf: transformers; each reads the weights of a trainer of its name; vllm with vllm_cfg.python or vllm_cfg.server_url: vLLM itself; null: that of policy.backend, and so are the names of NeMo RL's engines, with a notice",
    )
    max_new_tokens: Positive | None = key(None, "longest response in tokens; null: policy.max_total_sequence_length")
    temperature: Temperature = key(
        1.0, "sampling temperature (also divides the training logits); 0: greedy, in evaluations only"
    )
    top_p: TopP = key(1.0, "nucleus sampling; training's log-probabilities are filtered too; 1: off")
    top_k: Int | None = key(
        None,
        "sample among the k likeliest tokens; training's log-probabilities are filtered too; null or -1: off",
        ge=-1,
    )
    val_temperature: Temperature | None = key(None, "temperature in validation; null: temperature")
    val_top_p: TopP | None = key(None, "top_p in validation; null: top_p")
    val_top_k: Int | None = key(None, "top_k in validation; null: top_k", ge=-1)
    stop_token_ids: StopTokenIds | None = key(None, "tokens that end a response; null: the end tokens of the model")
    stop_strings: StopStrings | None = key(None, "texts that end a response; the response keeps them")
    expose_http_server: bool = key(
        False,
        "true: the policy is served over HTTP during training, by the routes of OpenAI and vLLM, and agents can train through it: "
        "docs/serving.md (alias: policy.generation.vllm_cfg.expose_http_server)",
    )
    http_server: HttpServerConfig = section(HttpServerConfig, "where and within which limits it is served")
    kv_cache_gb: Real | None = key(
        None, "memory for keys and values in GB; null: what the largest batch needs, within the free memory", gt=0
    )
    max_batch_size: Positive | None = key(
        None, "responses generated at the same time; null: as many as kv_cache_gb holds"
    )
    prefill_chunk_tokens: Positive = key(2048, "prompt tokens that the model computes at once; fewer save memory")
    packed_weights: Literal["off", "on", "auto"] = key(
        "auto",
        "on: steps of few texts (up to 12; 64 without bfloat16 instructions, 4 with AMX) read a copy of bfloat16 weights in 12 bits each, the same bits "
        "(CPU with AVX-512; 1.5 bytes a parameter); auto: once 16 such steps have run since the weights changed; off: never",
    )
    vllm_cfg: VllmConfig = section(VllmConfig, "vLLM's settings; of these max_model_len and enforce_eager are read")
    colocated: ColocatedConfig = section(ColocatedConfig, "whether generation shares the trainer's device")
    refit_cfg: RefitConfig = section(RefitConfig, "weight transfer of NeMo RL, not needed here")
    mcore_generation_config: McoreGenerationConfig = section(McoreGenerationConfig, "Megatron's engine, not used here")
    vllm_kwargs: dict[str, object] = key(
        {},
        "with vllm_cfg.python: further options of vLLM's server, by their names in vllm.LLM; else not read, but what would change results is refused",
    )

    @property
    def runs_vllm(self) -> bool:
        """Whether vLLM itself generates and is not replaced by the trainer's engine."""
        return self.backend == "vllm" and (self.vllm_cfg.python is not None or self.vllm_cfg.server_url is not None)

    def effective_max_model_len(self, max_total_sequence_length: int) -> int:
        """Return the longest sequence of generation: the smaller of vllm_cfg.max_model_len and the trainer's limit."""
        return min(self.vllm_cfg.max_model_len or max_total_sequence_length, max_total_sequence_length)


class EvalVllmConfig(VllmConfig):
    """Settings of vLLM. The native engine reads only max_model_len and precision."""

    precision: Literal["bfloat16", "float32"] | None = key(None, "of weights and products; null: bfloat16")


class EvalGenerationConfig(GenerationConfig):
    """Generation in an evaluation, with the model and the number of prompts per batch."""

    model_name: str = key(..., "folder, checkpoint of a run (step_N), packaged model or name on the hub")
    vllm_cfg: EvalVllmConfig = section(
        EvalVllmConfig, "settings of vLLM; only max_model_len, enforce_eager and precision are read"
    )
    num_prompts_per_step: Int = key(-1, "prompts generated at a time; -1: all", ge=-1)
    temperature: Temperature = key(0.0, "sampling temperature; 0: greedy")
