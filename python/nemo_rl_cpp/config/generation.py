"""The section `policy.generation` (`generation` in an evaluation): sampling, engines and the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .base import (
    DTYPES,
    Int,
    Positive,
    Quantization,
    Real,
    Section,
    StopStrings,
    StopTokenIds,
    Temperature,
    Text,
    TopP,
    fill,
    key,
    section,
)  # fmt: skip

FOREIGN_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""Engines of NeMo RL. The trainer's own engine replaces them, because results do not depend on the engine."""

_FOLDED = "Parallelism of the engine. A run uses one device instead, with the same results (cluster.strict_sizes)."


class VllmConfig(Section):
    """Settings of vLLM. vLLM generates if backend is vllm and `python` or `server_url` is set (docs/vllm.md). Otherwise
    the trainer's own engine replaces it, and uses max_model_len and enforce_eager."""

    python: str | None = None
    """Python interpreter of an environment that has vLLM installed. With backend vllm, the run starts a vLLM server
    with it, and that server generates. null: the trainer's own engine generates, unless server_url is set."""
    server_url: str | None = None
    """URL http://host:port of a running vLLM server, which generates if backend is vllm. Each refit sends it the new
    weights. docs/vllm.md shows how to start such a server. null: none."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """With python: time in seconds that vLLM may take to load the model. After it, the run ends with an error."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """With python or server_url: time limit in seconds for one generation step or one call of a refit. After it, the
    run ends with an error."""

    max_model_len: Positive | None = None
    """Maximum length of a sequence (prompt and response) in tokens. null: policy.max_total_sequence_length. Alias:
    policy.generation.max_model_len."""
    precision: str | None = None
    """With python: the dtype that vLLM computes in; null: policy.precision. With server_url: the dtype that the server
    must have; null: any. Otherwise policy.precision is used. Quantised types such as fp8 are errors."""
    kv_cache_dtype: str = "auto"
    """Accepted without effect, because NeMo RL's files contain it. The dtype of the KV cache is policy.precision; fp8
    and other quantised types are errors."""
    tensor_parallel_size: Positive = key(1, _FOLDED)
    pipeline_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    data_parallel_size: Positive = key(1, _FOLDED)
    enforce_eager: bool = False
    """On a GPU: true launches the kernels of a decode step one by one, false as a CUDA graph. The results are the same.
    With python it is passed to vLLM, which compiles the model if it is false."""
    http_refit_api_key_env_var: str | None = None
    """With server_url: environment variable that holds the API key of the server. Otherwise not used."""
    enable_prefix_caching: bool | None = None
    """With python: passed to vLLM; null: vLLM's default. The native engine always computes a prompt once per group."""
    env_vars: dict[str, object] | None = None
    """With python: environment variables for the vLLM server. The value null removes a variable. Otherwise not used."""

    def dtype_for(self, precision: str) -> str:
        """Return the full name of the dtype in which vLLM computes: that of the key `precision`, or if this is null or
        "auto", of the argument `precision`."""
        wanted = precision if self.precision in (None, "auto") else self.precision
        return DTYPES.get(wanted, wanted)


class ResourcesConfig(Section):
    """Settings of the workers that only generate, used if generation is not colocated: how many there are."""

    gpus_per_node: Positive | None = None
    """With cluster.num_nodes 1: number of workers that only generate; otherwise null or cluster.gpus_per_node."""
    num_nodes: Positive | None = None
    """With cluster.num_nodes above 1: number of nodes whose workers only generate. With one node: null or 1."""


class ColocatedConfig(Section):
    """Settings of the placement of generation: on the devices of training, or on workers that only generate."""

    enabled: bool = True
    """true: generation shares the devices and the weights of training. false: some workers (see resources) only
    generate, with their own copy of the weights, which is updated at each step. This needs cluster.executor processes
    or ray, or auto with rollouts that overlap with training. With auto and without such rollouts, generation stays
    colocated; see cluster.strict_sizes."""
    resources: ResourcesConfig = section(ResourcesConfig)


class NixlConfig(Section):
    """Settings of NeMo RL's NIXL weight transfer. The section is ignored."""


class RefitConfig(Section):
    """Settings of NeMo RL's weight transfer. The section is ignored."""

    nixl: NixlConfig = section(NixlConfig)


class McoreGenerationConfig(Section):
    """Settings of Megatron's generation engine. The section is ignored, so it accepts any keys."""

    model_config = ConfigDict(extra="allow")


EXPOSED = "policy.generation.expose_http_server"
PACKAGES = ("starlette", "uvicorn")


class HttpServerConfig(Section):
    """Settings of the HTTP server for the policy: its address and limits. Used if expose_http_server is true."""

    host: str = key("127.0.0.1", min_length=1)
    """Address that the server listens on. With 127.0.0.1 it can be reached from this machine only."""
    port: Int = key(0, "Port of the server. 0: a free port, which is printed.", ge=0, le=65535)
    api_key_variable: str | None = None
    """Environment variable with the API key of requests. null: a new key for each run, which agents receive."""
    max_queue: Positive = 1024
    """Maximum number of requests that are running or waiting. Further requests get status 503."""
    max_batch_size: Positive = key(64, "Maximum number of responses that the server generates at the same time.")
    max_body_mb: Real = key(8.0, "Maximum size of a request in MiB.", gt=0)
    request_timeout_s: Real = key(600.0, gt=0)
    """Time limit in seconds for a response, including the wait for new weights."""


class GenerationConfig(Section):
    """Settings of the sampling of responses, and of the engine that generates them."""

    spellings = {"max_model_len": "vllm_cfg.max_model_len", "vllm_cfg.expose_http_server": "expose_http_server"}
    backend: Literal["native", "hf", "vllm", "sglang", "megatron", "trtllm", "dynamo"] | None = None
    """Generation engine. native: the C++ engine. hf: transformers. vllm: a vLLM server, if vllm_cfg.python or
    vllm_cfg.server_url is set. null: the engine of policy.backend. native and hf need the same policy.backend. NeMo
    RL's other names, and vllm without a server, also select the engine of policy.backend, with a notice."""
    max_new_tokens: Positive | None = None
    """Maximum number of tokens in a response. null: policy.max_total_sequence_length."""
    temperature: Temperature = 1.0
    """Sampling temperature. Training divides the logits by it as well. 0: greedy decoding, in evaluations only."""
    top_p: TopP = 1.0
    """Nucleus sampling: sample from the most likely tokens whose probabilities add up to top_p. Training computes
    log-probabilities with the same filter. 1: off."""
    top_k: Int | None = key(None, ge=-1)
    """Sample from the k most likely tokens. Training's log-probabilities have the same filter. null or -1: off."""
    val_temperature: Temperature | None = key(None, "Sampling temperature in validation. null: temperature.")
    val_top_p: TopP | None = key(None, "top_p in validation. null: top_p.")
    val_top_k: Int | None = key(None, "top_k in validation. null: top_k.", ge=-1)
    stop_token_ids: StopTokenIds | None = None
    """Token ids that end a response. null: the model's end-of-sequence tokens."""
    stop_strings: StopStrings | None = None
    """Strings that end a response. The response includes the stop string. null: none."""
    expose_http_server: bool = False
    """Serve the policy over HTTP during training, with the routes of OpenAI and vLLM, so that agents can use it and be
    trained through it. See docs/serving.md. Alias: policy.generation.vllm_cfg.expose_http_server."""
    http_server: HttpServerConfig = section(HttpServerConfig)
    kv_cache_gb: Real | None = key(None, gt=0)
    """Size of the KV cache in GB. null: as much as the largest batch needs, limited by the free memory."""
    max_batch_size: Positive | None = None
    """Maximum number of responses generated at the same time. null: as many as fit in the KV cache."""
    prefill_chunk_tokens: Positive = 2048
    """Number of prompt tokens that are prefilled in one forward pass. A smaller number needs less memory."""
    packed_weights: Literal["off", "on", "auto"] = "auto"
    """Use a compressed copy of bfloat16 weights (12 bits per weight, same results) in decode steps with few sequences:
    up to 12; up to 64 on CPUs with AVX-512 but without bfloat16 instructions; up to 4 with AMX; up to 3 with AVX2
    alone. It needs 1.5 bytes per parameter. on: always. auto: make the copy after 16 such steps with the same weights. off: never."""
    vllm_cfg: VllmConfig = section(VllmConfig)
    colocated: ColocatedConfig = section(ColocatedConfig)
    refit_cfg: RefitConfig = section(RefitConfig)
    mcore_generation_config: McoreGenerationConfig = section(McoreGenerationConfig)
    vllm_kwargs: dict[str, object] = {}
    """With vllm_cfg.python: further options of vLLM, by the names of the arguments of vllm.LLM. Otherwise not used, but
    options that would change results are errors."""

    @property
    def runs_vllm(self) -> bool:
        """Whether vLLM generates. With backend vllm but no `python` or `server_url`, the trainer's own engine generates
        instead."""
        return self.backend == "vllm" and (self.vllm_cfg.python is not None or self.vllm_cfg.server_url is not None)

    def fill_validation(self) -> None:
        """Set val_temperature, val_top_p and val_top_k, if they are null, to the values for training."""
        fill(self, val_temperature=self.temperature, val_top_p=self.top_p, val_top_k=self.top_k)

    def effective_max_model_len(self, max_total_sequence_length: int) -> int:
        """Return the maximum sequence length of generation in tokens: the smaller of vllm_cfg.max_model_len and the
        trainer's `max_total_sequence_length`."""
        return min(self.vllm_cfg.max_model_len or max_total_sequence_length, max_total_sequence_length)


class EvalVllmConfig(VllmConfig):
    """Settings of vLLM in an evaluation. The native engine uses only max_model_len, enforce_eager and precision."""

    precision: Literal["float32", "bfloat16"] | None = None
    """dtype of the weights and of the matrix products. null: bfloat16."""


class EvalGenerationConfig(GenerationConfig):
    """Settings of generation in an evaluation, including its model and the number of prompts per batch."""

    model_name: Text
    """Model: a folder, a GGUF file, a run's checkpoint (step_N), a packaged model, or a name on the Hub."""
    quantization: Quantization | None = None
    """Format of the model's matrices, see `policy.quantization`. null: as vllm_cfg.precision. Native engine only."""
    vllm_cfg: EvalVllmConfig = section(EvalVllmConfig)
    num_prompts_per_step: Int = key(-1, "Number of prompts generated in one batch. -1: all.", ge=-1)
    temperature: Temperature = key(0.0, "Sampling temperature. 0: greedy decoding.")
