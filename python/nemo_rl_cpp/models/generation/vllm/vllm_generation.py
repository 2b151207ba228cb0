"""Generation by vLLM in a process of its own, with weights of its own that each refit brings."""

import json
import os
import time
from array import array
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.generation.base_engine import Answers
from nemo_rl_cpp.models.generation.interfaces import Moved
from nemo_rl_cpp.models.generation.vllm.process import VllmProcess, check_interpreter
from nemo_rl_cpp.models.generation.vllm.server import check_server
from nemo_rl_cpp.models.generation.vllm.server_generation import VllmServerGeneration
from nemo_rl_cpp.models.generation.vllm.vllm_engine import Request, VllmEngine
from nemo_rl_cpp.models.generation.vllm.weights import WeightBuffer
from nemo_rl_cpp.models.trained_model import TrainedModel
from nemo_rl_cpp.telemetry.memory import available_bytes

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK = 128  # tokens of a block of vLLM's cache on a CPU
_ROWS = 256  # responses at the same time, where max_batch_size is null
_LEAST_CACHE = 64_000_000


class Model(NamedTuple):
    """The model that vLLM makes: a folder with its config.json, the JSON itself, and the longest sequence."""

    folder: str
    config: dict[str, Plain]
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


class VllmGeneration(VllmEngine):
    """vLLM in the interpreter `policy.generation.vllm_cfg.python`. It starts with random weights.

    Args:
        policy, tokenizer, end_token_ids, seed: as of `VllmEngine`.
        config: section `policy`. Read are precision and of `generation` max_new_tokens, temperature, top_p, top_k, val_temperature,
            val_top_p, val_top_k, stop_token_ids, stop_strings, max_batch_size, prefill_chunk_tokens, kv_cache_gb, vllm_kwargs and
            of `vllm_cfg` python, start_timeout_s, timeout_s, max_model_len, precision, enforce_eager, enable_prefix_caching, env_vars.

    Raises ValueError for another version of vLLM, WorkerLostError where it does not begin.
    """

    def __init__(
        self, policy: TrainedModel, config: PolicyConfig, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        super().__init__(policy, config, tokenizer, end_token_ids=end_token_ids, seed=seed)
        vllm = config.generation.vllm_cfg
        self._knows_bytes = False
        self._weights = WeightBuffer(policy.state_dict())
        environment = worker_environment(vllm.env_vars)
        self.process = VllmProcess(
            vllm.python, environment, self._weights.descriptor, vllm.start_timeout_s, vllm.timeout_s
        )
        folder = Path(self.process.folder.name) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.model_config), encoding="utf-8")
        arguments = engine_arguments(config, Model(str(folder), self.model_config, self.max_model_len))
        self.process.begin({"manifest": self._weights.manifest, "bytes": self._weights.size, "engine": arguments})

    def _answer(self, requests: list[Request], sampling: dict[str, float], answers: Answers) -> None:
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(request.stops for request in requests))}
        if any(kinds):
            self._tell_bytes()
        message = {
            "requests": [[len(r.prompt), r.room, r.seed, kinds[r.stops]] for r in requests],
            "sampling": sampling, "stop_token_ids": self._stop_token_ids,
            "stops": [[text.encode().hex() for text in kind] for kind in kinds],
        }  # fmt: skip
        payload = array("i", chain.from_iterable(request.prompt for request in requests)).tobytes()

        def take(step: dict, found: bytes) -> None:
            """A step of vLLM: int32 token ids of all rows that ended, then float32 log-probabilities."""
            half, begin, done = len(found) // 2, 0, []
            tokens, logprobs = array("i", found[:half]), array("f", found[half:])
            for number, length, truncated in step["finished"]:
                row, end = requests[number].row, begin + length
                answers.put(row, list(tokens[begin:end]), list(logprobs[begin:end]), truncated)
                begin = end
                done.append(row)
            if step["running"]:
                answers.tell(done)

        answer = self.process.call("generate", message, payload, take)
        self._check_version(answer["version"])

    def _tell_bytes(self) -> None:
        """Sends the bytes of all tokens, once."""
        if not self._knows_bytes:
            table = self._token_bytes
            self.process.call("token_bytes", {"lengths": [len(token) for token in table]}, b"".join(table))
            self._knows_bytes = True

    # ---- weights and memory

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """As `VllmEngine.update_weights`, through memory that both processes map."""
        self.process.wait_until_ready()
        began = time.perf_counter()
        self.weight_version = self._arrived = None
        sent = self._weights.fill(weights)
        answer = self.process.call("update", {"digest": sent, "version": version})
        if answer["digest"] != sent:
            raise RuntimeError(
                f"the weights that vLLM has are not the policy's: digest {answer['digest']} against {sent}"
            )
        self.weight_version, self._arrived = version, sent
        self._check_version(answer["version"])
        return Moved(self._weights.weight_bytes, time.perf_counter() - began, sent)

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Wakes vLLM up; on a CPU it does not sleep."""
        return bool(self.process.call("wake")["done"])

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Lets vLLM sleep; on a CPU it does not."""
        return bool(self.process.call("sleep")["done"])

    def shutdown(self) -> bool:
        """Ends vLLM's process and gives the weights' memory back. Safe to call twice."""
        self.process.kill()
        self._weights.close()
        return True


def check_vllm(policy: PolicyConfig, device: str) -> None:
    """ValueError where the vLLM of a configuration is not there, or is none that a run on `device` can use."""
    if policy.generation.vllm_cfg.server_url is None:
        check_interpreter(policy.generation.vllm_cfg.python)
    else:
        check_server(policy, device)


def vllm_of(policy: TrainedModel, config: PolicyConfig, tokenizer: TokenizerType, seed: int) -> VllmEngine:
    """vLLM for the policy of a run: in a process of its own, or behind `vllm_cfg.server_url`.

    ValueError for a policy that does not give its weights out, as one of the user's own may not.
    """
    vllm = config.generation.vllm_cfg
    key = "python" if vllm.server_url is None else "server_url"
    if not hasattr(policy, "state_dict") or not hasattr(policy, "saved_config"):
        raise ValueError(
            f"{type(policy).__name__} has no state_dict and saved_config, from which vLLM gets its weights and config.json: set "
            f"policy.generation.vllm_cfg.{key} to null"
        )
    other = getattr(policy, "other_names_in_checkpoints", None)
    if other is not None:
        raise ValueError(
            f"policy.backend is hf, and {other}, which vLLM reads: set policy.generation.vllm_cfg.{key} to null, or train another model"
        )
    path = getattr(getattr(policy, "folder", None), "path", None)
    ends = end_token_ids(path, policy.saved_config(), tokenizer)
    kind = VllmGeneration if vllm.server_url is None else VllmServerGeneration
    return kind(policy, config, tokenizer, end_token_ids=ends, seed=seed)
