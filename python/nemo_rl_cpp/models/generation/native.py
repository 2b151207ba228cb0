"""Generation on the native engine: token ids in, token ids out, log-probabilities of the very tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface

STREAMS = {"train": 0, "val": 1, "eval": 2}
DEFAULT_CACHE_GB = 4.0
DEFAULT_BATCH_SIZE = 256


class NativeGeneration(GenerationInterface):
    """NeMo RL's generation interface over the C++ engine.

    Args:
        runner: the model (`C.NativeModelRunner` on the trainer's weights).
        config: the `policy.generation` section.
        tokenizer: gives the end token, padding, and the bytes on which stop strings are matched.
        max_model_len: longest sequence, prompt and response; None: `vllm_cfg.max_model_len`.
        seed: part of the key of every random draw.
        digest: digest of the weights the engine reads, for the check that the trainer holds the same.
    """

    def __init__(
        self, runner: Any, config: Any, tokenizer: Any, *, max_model_len: int | None = None, seed: int = 42,
        digest: Callable[[], str] | None = None,
    ):  # fmt: skip
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self._digest = digest
        self.max_model_len = max_model_len or config.vllm_cfg.max_model_len or 0
        self._end_ids = config.stop_token_ids if config.stop_token_ids is not None else _end_tokens(tokenizer)
        self._engine = C.Engine(
            runner, max_batch_size=config.max_batch_size or DEFAULT_BATCH_SIZE, prefill_chunk_tokens=config.prefill_chunk_tokens,
            max_model_len=self.max_model_len, max_cache_bytes=int((config.kv_cache_gb or DEFAULT_CACHE_GB) * 1e9),
            token_bytes=token_bytes_table(tokenizer, runner.vocab_size()),
        )  # fmt: skip
        self._draws = 0

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """A response for every row; see `GenerationDatumSpec` for the keys and `GenerationOutputSpec` for the result.

        Rows with equal prompts share one prefill. The text of a row depends on its prompt, its random key (seed, stream,
        draw_ids, sample_index) and the sampling settings alone.
        """
        ids, lengths = data["input_ids"], [int(n) for n in data["input_lengths"]]
        if not lengths:
            raise ValueError("generate: the batch has no rows")
        prompts, prompt_of = _distinct([row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)])
        streams = _per_row(data.get("stream"), len(lengths), "train")
        generations = self._engine.generate(
            prompts, prompt_of, self._params(greedy, streams[0]), self._stop_strings(data.get("stop_strings"), len(lengths)), self.seed,
            [STREAMS[s] for s in streams], self._draw_ids(data.get("draw_ids"), len(lengths)),
            [int(i) for i in data.get("sample_index", [0] * len(lengths))],
        )  # fmt: skip
        return self._output(ids, lengths, generations)

    def _params(self, greedy: bool, stream: str) -> dict[str, Any]:
        c = self.config
        prefix = "val_" if stream == "val" else ""
        temperature = getattr(c, f"{prefix}temperature", None)
        temperature = c.temperature if temperature is None else temperature
        top_p, top_k = getattr(c, f"{prefix}top_p", None), getattr(c, f"{prefix}top_k", None)
        greedy = greedy or temperature == 0
        return {
            "temperature": 1.0 if greedy else temperature, "top_p": 1.0 if top_p is None else top_p, "top_k": max(top_k or 0, 0),
            "greedy": greedy, "max_new_tokens": c.max_new_tokens, "stop_token_ids": list(self._end_ids),
        }  # fmt: skip

    def _stop_strings(self, per_row: Any, size: int) -> list[list[str]]:
        common = list(self.config.stop_strings or [])
        return [common + [s for s in (row or []) if s not in common] for row in (per_row or [None] * size)]

    def _draw_ids(self, draw_ids: Any, size: int) -> list[int]:
        if draw_ids is not None:
            return [int(i) for i in draw_ids]
        first, self._draws = self._draws, self._draws + size
        return list(range(first, first + size))

    def _output(self, ids: Tensor, lengths: list[int], generations: list[Any]) -> BatchedDataDict:
        total = [n + len(g.token_ids) for n, g in zip(lengths, generations, strict=True)]
        width = max(total)
        output_ids = torch.full((len(lengths), width), self.tokenizer.pad_token_id, dtype=torch.int64)
        logprobs = torch.zeros(len(lengths), width)
        for row, (n, g) in enumerate(zip(lengths, generations, strict=True)):
            output_ids[row, :n] = ids[row, :n]
            output_ids[row, n : total[row]] = torch.tensor(g.token_ids, dtype=torch.int64)
            logprobs[row, n : total[row]] = torch.tensor(g.logprobs)
        return BatchedDataDict(
            output_ids=output_ids,
            generation_lengths=torch.tensor([len(g.token_ids) for g in generations]),
            unpadded_sequence_lengths=torch.tensor(total),
            logprobs=logprobs,
            truncated=torch.tensor([g.finish_reason == "length" for g in generations]),
        )

    def weight_digest(self) -> str:
        """Digest of the weights that the engine reads."""
        if self._digest is None:
            raise ValueError("this generation was built without a weight digest")
        return self._digest()

    def get_logger_metrics(self) -> dict[str, Any]:
        """Sums since `clear_logger_metrics`: tokens, steps, times, preemptions."""
        metrics = self._engine.metrics
        names = ("steps", "generated_tokens", "prefill_tokens", "decode_tokens", "shared_prompt_tokens", "peak_blocks", "preemptions",
                 "forward_seconds", "sampling_seconds")  # fmt: skip
        values = {name: getattr(metrics, name) for name in names}
        return values | {"mean_batch": metrics.sequence_steps / metrics.steps if metrics.steps else 0.0}

    def clear_logger_metrics(self) -> None:
        self._engine.reset_metrics()

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing to wake: the weights are in place, the cache is allocated by the first batch."""
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Gives the cache's memory back until the next rollout."""
        self._engine.release_cache()
        return True

    def invalidate_kv_cache(self) -> bool:
        """Every `generate` starts with an empty cache: nothing computed with older weights is ever read."""
        return True

    def shutdown(self) -> bool:
        self._engine.release_cache()
        return True


def _end_tokens(tokenizer: Any) -> list[int]:
    """The tokenizer's end tokens (some models have several), or its single one."""
    several = getattr(tokenizer, "eos_token_ids", None)
    if several:
        return [int(i) for i in several]
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _distinct(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The different prompts in order of appearance, and which one each row has."""
    index: dict[tuple[int, ...], int] = {}
    prompt_of = [index.setdefault(tuple(p), len(index)) for p in prompts]
    return [list(p) for p in index], prompt_of


def _per_row(value: Any, size: int, default: str) -> list[str]:
    rows = [value or default] * size if value is None or isinstance(value, str) else [v or default for v in value]
    unknown = sorted(set(rows) - set(STREAMS))
    if unknown or len(set(rows)) > 1:
        raise ValueError(f"stream must be one of {', '.join(STREAMS)} for the whole batch, got {sorted(set(rows))}")
    return rows
