"""Sections of `policy.generation` that steer NeMo RL's engines and its weight transfer; the native engine reads few of their keys."""

from typing import Annotated

from pydantic import ConfigDict, Field

from .base import Positive, Section, key, section

FOREIGN_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""NeMo RL's names in policy.generation.backend: an engine is an implementation, not a result, so the native one stands in."""

_FOLDED = "how the engine is cut, not what it computes: folded onto one device, see cluster.strict_sizes"


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Other names that vLLM takes for its types."""


class VllmConfig(Section):
    """Settings of vLLM. With `python` or `server_url`, and backend vllm, vLLM itself generates (docs/vllm.md); else the trainer's own
    engine stands in for it, and reads max_model_len and enforce_eager."""

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


class RefitConfig(Section):
    """Weight transfer of NeMo RL."""

    nixl: NixlConfig = section(NixlConfig, "transfer by NIXL")


class McoreGenerationConfig(Section):
    """Megatron's generation engine; not read by the native engine, so that further keys are accepted."""

    model_config = ConfigDict(extra="allow")
