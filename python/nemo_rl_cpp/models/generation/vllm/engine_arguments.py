"""What vLLM is started with: arguments of `vllm.LLM` and environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from nemo_rl_cpp.telemetry.memory import available_bytes

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.models.json_values import JsonObject

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK = 128  # tokens of a block of vLLM's cache on a CPU
_ROWS = 256  # responses at the same time, where max_batch_size is null
_LEAST_CACHE = 64_000_000


class Model(NamedTuple):
    """The model that vLLM makes: a folder with its config.json, the JSON itself, and the longest sequence."""

    folder: str
    config: JsonObject
    longest: int


def engine_arguments(policy: PolicyConfig, model: Model) -> dict[str, object]:
    """Keyword arguments of `vllm.LLM`; those of `vllm_kwargs` last, which `config/rules_vllm.py` keeps from changing ours."""
    generation = policy.generation
    vllm = generation.vllm_cfg
    rows = generation.max_batch_size or _ROWS
    dtype = vllm.dtype_for(policy.precision)
    arguments: dict[str, object] = {
        "model": model.folder, "dtype": dtype, "max_model_len": model.longest, "max_num_seqs": rows,
        "max_num_batched_tokens": max(generation.prefill_chunk_tokens, rows, model.longest),
        "kv_cache_memory_bytes": _cache_bytes(generation.kv_cache_gb, model, rows, _BYTES[dtype]),
        "enforce_eager": vllm.enforce_eager, "seed": 0, "load_format": "dummy", "skip_tokenizer_init": True,
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "disable_log_stats": True,
        "distributed_executor_backend": "uni", "async_scheduling": False,
        "enable_chunked_prefill": False,  # a prompt in two parts takes its seed's generator back by a step, which those of CPUs cannot
    }  # fmt: skip
    if vllm.enable_prefix_caching is not None:
        arguments["enable_prefix_caching"] = vllm.enable_prefix_caching
    return {**arguments, **generation.vllm_kwargs}


def _cache_bytes(gigabytes: float | None, model: Model, rows: int, element: int) -> int:
    """kv_cache_gb, or what `rows` longest sequences take, within half of the memory that is free."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    config = model.config.get("text_config") or model.config
    heads = config.get("num_attention_heads") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    of_token = 2 * (config.get("num_hidden_layers") or 0) * kv_heads * head_dim * element
    blocks = rows * -(-model.longest // _BLOCK) + 1  # one of them is vLLM's own
    wanted = max(blocks * _BLOCK * of_token, _LEAST_CACHE)
    return max(min(wanted, available_bytes() // 2), 1)


def worker_environment(given: Mapping[str, object] | None) -> dict[str, str]:
    """All environment variables of vLLM's process: those of this one, then all of vLLM in one process, as many threads as here,
    nothing sent out; `env_vars` last, of which null takes a variable away."""
    ours = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    given = given or {}
    taken = {name for name, value in given.items() if value is None}
    every = {**os.environ, **ours, **{name: str(value) for name, value in given.items()}}
    return {name: value for name, value in every.items() if name not in taken}
