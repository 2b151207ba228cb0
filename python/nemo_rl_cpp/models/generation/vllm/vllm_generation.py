"""Generation by vLLM in a process of its own, with weights of its own that each refit brings."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from struct import pack
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, Responses
from nemo_rl_cpp.models.generation.refit import Moved
from nemo_rl_cpp.models.generation.settings import STREAMS, EngineSettings, ragged_prompts, row_integers, the_stream
from nemo_rl_cpp.models.generation.vllm.engine_arguments import Model, engine_arguments, worker_environment
from nemo_rl_cpp.models.generation.vllm.process import VllmProcess
from nemo_rl_cpp.models.generation.vllm.shared_weights import WeightBuffer

if TYPE_CHECKING:
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationOutputSpec
    from nemo_rl_cpp.models.json_values import JsonObject

Finished = Callable[[list[int], list[list[int]]], None]


class WeightsOwner(Protocol):
    """The trainer, as far as vLLM needs it: a policy in this process."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """The present weights by the names of the model's checkpoints."""

    def saved_config(self) -> JsonObject:
        """config.json of a checkpoint."""


class VllmGeneration(EngineSettings, GenerationInterface):
    """NeMo RL's generation interface on vLLM.

    vLLM lives in the interpreter `policy.generation.vllm_cfg.python`. It starts with random weights and generates nothing before the
    first `update_weights`. A sample is drawn by vLLM with a seed of its own, made from (seed, stream, draw id, sample, length of the
    prompt), so that a run that is repeated asks for the same. vLLM's log-probabilities are not those of training to the bit.

    Args:
        policy: whose weights and config.json vLLM gets.
        config: section `policy`. Read are precision and of `generation` max_new_tokens, temperature, top_p, top_k, val_temperature,
            val_top_p, val_top_k, stop_token_ids, stop_strings, max_batch_size, prefill_chunk_tokens, kv_cache_gb, vllm_kwargs and
            of `vllm_cfg` python, start_timeout_s, timeout_s, max_model_len, precision, enforce_eager, enable_prefix_caching, env_vars.
        tokenizer, end_token_ids, seed: as of `EngineSettings`.

    Attributes:
        weight_version: of the weights that vLLM has; None before the first refit.

    Raises ValueError for another version of vLLM, WorkerLostError where it does not begin.
    """

    reports_finished = True
    owns_process = True

    def __init__(
        self, policy: WeightsOwner, config: PolicyConfig, tokenizer: TokenizerType, *, end_token_ids: list[int] | None = None, seed: int = 42
    ) -> None:  # fmt: skip
        generation = config.generation
        longest = generation.effective_max_model_len(config.max_total_sequence_length)
        super().__init__(generation, tokenizer, end_token_ids=end_token_ids, max_model_len=longest, seed=seed)
        vllm = generation.vllm_cfg
        self.sampling(greedy=False, stream="train")  # reports bad values now rather than at the first step
        self.weight_version: int | None = None
        self._digest: str | None = None
        self._vocab_size: int | None = None
        self._knows_bytes = False
        self._weights = WeightBuffer(policy.state_dict())
        self.process = VllmProcess(
            vllm.python,
            worker_environment(vllm.env_vars),
            self._weights.descriptor,
            vllm.start_timeout_s,
            vllm.timeout_s,
        )
        model = policy.saved_config()
        folder = Path(self.process.folder.name) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        self._vocab_size = int(model.get("vocab_size") or model.get("text_config", {}).get("vocab_size") or 0)
        arguments = engine_arguments(config, Model(str(folder), model, longest))
        self.process.begin({"manifest": self._weights.manifest, "bytes": self._weights.size, "engine": arguments})

    # ---- token ids in, token ids out

    def generate(
        self, data: RaggedBatch | BatchedDataDict[GenerationDatumSpec], greedy: bool = False, on_finished: Finished | None = None
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:  # fmt: skip
        """A response for every row, as `NativeGeneration.generate` gives it; the token or the text that ends a response stays part of it.

        Raises ValueError for rows that do not fit their lengths, unknown streams, or rows of several streams at once; VllmError
        before the first refit; WorkerLostError when vLLM has ended, or has made no step for vllm_cfg.timeout_s.
        """
        batch = data if isinstance(data, RaggedBatch) else ragged_prompts(data)
        stream = the_stream(data.get("stream"), batch.size)
        room = self.max_new_tokens(batch.lengths)
        room = torch.minimum(room, self.max_model_len - batch.lengths).clamp(min=0).tolist()
        draws = self.draw_ids(data.get("draw_ids"), batch.size).tolist()
        samples = row_integers("sample_index", data.get("sample_index", torch.zeros(batch.size)), batch.size).tolist()
        texts = self.stop_texts(data.get("stop_strings"), batch.size)
        if any(texts):
            self._tell_bytes()
        rows = [row for row in range(batch.size) if room[row] > 0]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(texts))}
        prompts = batch.rows(batch.tokens["input_ids"])
        requests = [
            [len(prompts[row]), room[row], self._seed_of(STREAMS[stream], draws[row], samples[row], len(prompts[row])), kinds[texts[row]]]
            for row in rows
        ]  # fmt: skip
        found = _Answers(rows, batch.size, on_finished)
        if rows:
            message = {
                "requests": requests, "sampling": self._sampling_arguments(greedy, stream), "stop_token_ids": self._stop_token_ids,
                "stops": [[text.encode().hex() for text in kind] for kind in kinds],
            }  # fmt: skip
            payload = array("i", chain.from_iterable(prompts[row].tolist() for row in rows)).tobytes()
            answer = self.process.call("generate", message, payload, found.take)
            self._check_version(answer["version"])
        responses = found.responses(self.weight_version)
        return responses if batch is data else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    def _sampling_arguments(self, greedy: bool, stream: str) -> dict[str, float]:
        sampling = self.sampling(greedy, stream)
        if sampling.greedy:
            return {"temperature": 0.0}
        return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

    def _seed_of(self, stream: int, draw: int, sample: int, length: int) -> int:
        """63 bits of the key of a response. The prompt's length sets the turns of a conversation apart."""
        digest = blake2b(pack("<IIqqq", self.seed, stream, draw, sample, length), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _tell_bytes(self) -> None:
        """Sends the bytes of all tokens, once: stop strings are looked for in them."""
        if not self._knows_bytes:
            table = token_bytes_table(self.tokenizer, self._vocab_size)
            self.process.call("token_bytes", {"lengths": [len(token) for token in table]}, b"".join(table))
            self._knows_bytes = True

    def _check_version(self, version: int | None) -> None:
        if version != self.weight_version:
            raise RuntimeError(
                f"vLLM answered with weights of version {version}, and version {self.weight_version} was sent"
            )

    # ---- weights and memory

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> Moved:
        """Brings the weights to vLLM, in its own types where they differ; those of `version` from then on.

        Raises RuntimeError when what arrived has another digest than what was sent, or a parameter of vLLM's model got nothing; vLLM
        generates nothing then.
        """
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

    def weight_digest(self) -> str:
        """Of the weights that arrived at the last refit, 32 hexadecimal digits. RuntimeError before the first."""
        if self._digest is None:
            raise RuntimeError("vLLM has no weights before the first sync_weights")
        return self._digest

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Wakes vLLM up; on a CPU it does not sleep."""
        return bool(self.process.call("wake")["done"])

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Lets vLLM sleep; on a CPU it does not."""
        return bool(self.process.call("sleep")["done"])

    def invalidate_kv_cache(self) -> bool:
        """Nothing to do: vLLM forgets keys and values with each refit."""
        return True

    def shutdown(self) -> bool:
        """Ends vLLM's process and gives the weights' memory back. Safe to call twice."""
        self.process.kill()
        self._weights.close()
        return True


def vllm_of(policy: WeightsOwner, config: PolicyConfig, tokenizer: TokenizerType, seed: int) -> VllmGeneration:
    """vLLM for the policy of a run. ValueError for a policy that does not give its weights out, as one of the user's own may not."""
    if not hasattr(policy, "state_dict") or not hasattr(policy, "saved_config"):
        raise ValueError(
            f"{type(policy).__name__} has no state_dict and saved_config, from which vLLM gets its weights and config.json: set "
            "policy.generation.vllm_cfg.python to null"
        )
    other = getattr(policy, "other_names_in_checkpoints", None)
    if other is not None:
        raise ValueError(
            f"policy.backend is hf, and {other}, which vLLM reads: set policy.generation.vllm_cfg.python to null, or train another model"
        )
    path = getattr(getattr(policy, "folder", None), "path", None)
    ends = end_token_ids(path, policy.saved_config(), tokenizer)
    return VllmGeneration(policy, config, tokenizer, end_token_ids=ends, seed=seed)


class _Answers:
    """The responses as they end."""

    def __init__(self, rows: list[int], count: int, on_finished: Finished | None) -> None:
        self.rows, self.on_finished = rows, on_finished
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.truncated = [True] * count  # a row without room

    def take(self, message: dict, payload: bytes) -> None:
        """A step of vLLM: int32 token ids of all rows that ended, then float32 log-probabilities."""
        half, begin = len(payload) // 2, 0
        tokens, logprobs = array("i", payload[:half]), array("f", payload[half:])
        done = []
        for number, length, truncated in message["finished"]:
            row, end = self.rows[number], begin + length
            self.tokens[row], self.logprobs[row] = list(tokens[begin:end]), list(logprobs[begin:end])
            self.truncated[row] = truncated
            begin = end
            done.append(row)
        if done and message["running"] and self.on_finished is not None:
            self.on_finished(done, [list(self.tokens[row]) for row in done])

    def responses(self, version: int | None) -> Responses:
        """All of them. RuntimeError where a log-probability is not finite: vLLM's logits are not then."""
        logprobs = torch.tensor(list(chain.from_iterable(self.logprobs)), dtype=torch.float32)
        if not bool(torch.isfinite(logprobs).all()):
            raise RuntimeError("vLLM gave a log-probability that is not finite: the model's logits are not")
        return Responses(
            torch.tensor(list(chain.from_iterable(self.tokens)), dtype=torch.int64),
            offsets_of(torch.tensor([len(row) for row in self.tokens])), logprobs, torch.tensor(self.truncated), version,
        )  # fmt: skip


__all__ = ["VllmGeneration", "WeightsOwner", "vllm_of"]
