"""Generation by vLLM in a process of its own, with weights of its own that each refit brings."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.models.generation.refit import Moved
from nemo_rl_cpp.models.generation.vllm.engine_arguments import Model, engine_arguments, worker_environment
from nemo_rl_cpp.models.generation.vllm.process import VllmProcess, check_interpreter
from nemo_rl_cpp.models.generation.vllm.server_check import check_server
from nemo_rl_cpp.models.generation.vllm.server_generation import VllmServerGeneration
from nemo_rl_cpp.models.generation.vllm.shared_weights import WeightBuffer
from nemo_rl_cpp.models.generation.vllm.vllm_engine import Answers, Asked, VllmEngine, WeightsOwner, vocabulary_of

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.interfaces import TokenizerType


class VllmGeneration(VllmEngine):
    """vLLM in the interpreter `policy.generation.vllm_cfg.python`. It starts with random weights.

    Args:
        policy: whose weights and config.json vLLM gets.
        config: section `policy`. Read are precision and of `generation` max_new_tokens, temperature, top_p, top_k, val_temperature,
            val_top_p, val_top_k, stop_token_ids, stop_strings, max_batch_size, prefill_chunk_tokens, kv_cache_gb, vllm_kwargs and
            of `vllm_cfg` python, start_timeout_s, timeout_s, max_model_len, precision, enforce_eager, enable_prefix_caching, env_vars.
        tokenizer, end_token_ids, seed: as of `EngineSettings`.

    Raises ValueError for another version of vLLM, WorkerLostError where it does not begin.
    """

    def __init__(
        self, policy: WeightsOwner, config: PolicyConfig, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        model = policy.saved_config()
        super().__init__(config, vocabulary_of(model), tokenizer, end_token_ids=end_token_ids, seed=seed)
        vllm = config.generation.vllm_cfg
        self._knows_bytes = False
        self._weights = WeightBuffer(policy.state_dict())
        self.process = VllmProcess(
            vllm.python,
            worker_environment(vllm.env_vars),
            self._weights.descriptor,
            vllm.start_timeout_s,
            vllm.timeout_s,
        )
        folder = Path(self.process.folder.name) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        arguments = engine_arguments(config, Model(str(folder), model, self.max_model_len))
        self.process.begin({"manifest": self._weights.manifest, "bytes": self._weights.size, "engine": arguments})

    def _answer(self, asked: Asked, answers: Answers) -> None:
        requests = asked.requests
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(request.stops for request in requests))}
        if any(kinds):
            self._tell_bytes()
        message = {
            "requests": [[len(r.prompt), r.room, r.seed, kinds[r.stops]] for r in requests],
            "sampling": asked.sampling, "stop_token_ids": self._stop_token_ids,
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
            table = self._token_bytes()
            self.process.call("token_bytes", {"lengths": [len(token) for token in table]}, b"".join(table))
            self._knows_bytes = True

    # ---- weights and memory

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """As `VllmEngine.update_weights`, through memory that both processes map."""
        self.process.wait_until_ready()
        began = time.perf_counter()
        self.weight_version = self._digest = None
        sent = self._weights.fill(weights)
        answer = self.process.call("update", {"digest": sent, "version": version})
        if answer["digest"] != sent:
            raise RuntimeError(
                f"the weights that vLLM has are not the policy's: digest {answer['digest']} against {sent}"
            )
        self.weight_version, self._digest = version, sent
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


def vllm_of(policy: WeightsOwner, config: PolicyConfig, tokenizer: TokenizerType, seed: int) -> VllmEngine:
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


__all__ = ["VllmGeneration", "WeightsOwner", "check_vllm", "vllm_of"]
