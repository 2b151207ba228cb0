"""Generation on the native engine: token ids in, token ids out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, Responses
from nemo_rl_cpp.models.generation.settings import (
    DEFAULT_CHUNK,
    STREAMS,
    EngineSettings,
    get_setting,
    ragged_prompts,
    row_integers,
    the_stream,
)

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationOutputSpec

_UNLIMITED_SLOTS = 1 << 20


def native_runner(model: C.DecoderModel, config: EvalGenerationConfig | Mapping[str, object]) -> C.NativeModelRunner:
    """The engine's way into a `C.DecoderModel`, whose weights it reads in place.

    On a CUDA device it launches decode steps as CUDA graphs unless `config.vllm_cfg.enforce_eager`; on the CPU, as `config.packed_weights`
    says, steps of few texts read bfloat16 weights in twelve bits each. Either way the results are the same.
    """
    eager = bool(get_setting(get_setting(config, "vllm_cfg"), "enforce_eager"))
    packed = get_setting(config, "packed_weights")
    return C.NativeModelRunner(model, enforce_eager=eager, packed_weights="auto" if packed is None else packed)


class NativeGeneration(EngineSettings, GenerationInterface):
    """NeMo RL's generation interface on the C++ engine.

    What a row yields depends on its prompt, its sampling settings and its random key (seed, stream, draw id, sample)
    alone, never on the rest of the batch or on the engine's limits. Rows with equal prompts share one prefill. The token
    or the text that ends a response stays part of it, so that what is trained on is what was sampled.

    Args:
        runner: the model; `native_runner(model, config)` reads the trainer's weights in place.
        config: section `policy.generation`, a mapping or a typed model. Read are max_new_tokens, temperature, top_p,
            top_k, val_temperature, val_top_p, val_top_k, stop_token_ids, stop_strings, max_batch_size,
            prefill_chunk_tokens, kv_cache_gb and vllm_cfg.max_model_len.
        tokenizer: gives the pad token and the bytes on which stop strings are matched.
        end_token_ids: where responses end without `stop_token_ids` (`data.boundaries`); None: at the tokenizer's end tokens.
        max_model_len: longest sequence, prompt and response together; None: `vllm_cfg.max_model_len`, or no limit.
        seed: part of the key of every random draw.
        digest: gives a digest of the weights that the engine reads.
        memory_share: the part of this machine's free memory that this engine may count on.

    Raises ValueError for unknown keys and for values that cannot be (temperature < 0, top_p outside (0, 1], empty stop strings, ...).
    """

    def __init__(
        self,
        runner: C.ModelRunner,
        config: EvalGenerationConfig | Mapping[str, object],
        tokenizer: TokenizerType,
        *,
        end_token_ids: Sequence[int] | None = None,
        max_model_len: int | None = None,
        seed: int = 42,
        digest: Callable[[], str] | None = None,
        memory_share: float = 1.0,
    ) -> None:
        super().__init__(config, tokenizer, end_token_ids=end_token_ids, max_model_len=max_model_len, seed=seed)
        self._runner = runner
        self._vocab_size = runner.vocab_size()
        self._digest = digest
        self._memory_share = memory_share
        self._agree: Callable[[int], int] | None = None
        self._knows_bytes = False
        self._engine = C.Engine(
            runner,
            max_batch_size=get_setting(config, "max_batch_size") or _UNLIMITED_SLOTS,
            prefill_chunk_tokens=get_setting(config, "prefill_chunk_tokens") or DEFAULT_CHUNK,
            max_model_len=self.max_model_len,
        )
        self.sampling_rule(greedy=False, stream="train")  # reports bad values now rather than at the first step
        self._limit_cache()

    # ---- generating

    reports_finished = True
    owns_process = False

    def generate(
        self,
        data: RaggedBatch | BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        on_finished: Callable[[list[int], list[list[int]]], None] | None = None,
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:
        """A response for every row. Of a RaggedBatch: `Responses`; of padded prompts, with the keys of `GenerationDatumSpec`: a
        `GenerationOutputSpec`.

        `greedy` takes the likeliest token each time and reports log-probabilities at temperature 1 without a filter.
        Rows of the stream "val" use val_temperature, val_top_p and val_top_k where these are set. A prompt that leaves
        no room under max_model_len gets an empty response that counts as truncated.

        `on_finished(rows, token_ids)` is called between two steps of the engine with the rows whose responses have just
        ended and these responses, each row once, those of the last step excepted; what it raises ends the generation.

        Raises ValueError for rows that do not fit their lengths, unknown streams, or rows of several streams at once;
        RuntimeError when the model's logits are not finite; KeyboardInterrupt within one step of Ctrl-C.
        """
        batch = data if isinstance(data, RaggedBatch) else ragged_prompts(data)
        stream = the_stream(data.get("stream"), batch.size)
        prompts = _distinct_prompts(batch)
        self._runner.keep_activations(stream == "train")
        generated = self._engine.generate(
            prompts.ids,
            prompts.offsets,
            self._requests(data, prompts.index, batch.lengths, greedy, stream),
            on_finished,
        )
        truncated = generated.finish_reasons == int(C.FinishReason.length)
        responses = Responses(generated.token_ids, generated.offsets, generated.logprobs, truncated)
        return responses if batch is data else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    def _requests(
        self,
        data: RaggedBatch | BatchedDataDict[GenerationDatumSpec],
        prompt_index: Tensor,
        lengths: Tensor,
        greedy: bool,
        stream: str,
    ) -> C.GenerationRequests:
        rows = len(lengths)
        stop_sets, stop_set = self._stop_sets(data.get("stop_strings"), rows)
        return C.GenerationRequests(
            prompt_index=prompt_index,
            draw_ids=self.draw_ids(data.get("draw_ids"), rows),
            sample_index=row_integers("sample_index", data.get("sample_index", torch.zeros(rows)), rows),
            streams=torch.full((rows,), STREAMS[stream]),
            max_new_tokens=self.max_new_tokens(lengths),
            stop_set=stop_set,
            seed=self.seed,
            rule=self.sampling_rule(greedy, stream),
            stop_token_ids=self._stop_token_ids,
            stop_sets=stop_sets,
        )

    def _stop_sets(
        self, per_row: Sequence[str | Sequence[str] | None] | None, rows: int
    ) -> tuple[list[list[bytes]], Tensor]:
        """The different sets of stop strings, and which one each row has."""
        index: dict[tuple[str, ...], int] = {}
        chosen = [index.setdefault(texts, len(index)) for texts in self.stop_texts(per_row, rows)]
        if any(index) and not self._knows_bytes:
            self._engine.set_token_bytes(token_bytes_table(self.tokenizer, self._vocab_size))
            self._knows_bytes = True
        return [[text.encode() for text in texts] for texts in index], torch.tensor(chosen)

    # ---- memory, weights and metrics

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Measures the memory that the cache may take; the weights are in place, and the first batch allocates."""
        self._limit_cache()
        return True

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Gives the memory of keys and values back."""
        self._engine.release_cache()
        return True

    def shutdown(self) -> bool:
        """Gives all memory back. Safe to call twice."""
        self._engine.release_cache()
        return True

    def invalidate_kv_cache(self) -> bool:
        """Nothing to forget: every `generate` begins with an empty cache, so no key of older weights is ever read."""
        return True

    def plan_with_peers(self, least: Callable[[int], int]) -> None:
        """For engines that have slices of one model and must plan the same steps: their caches get one size. `least` gives the least
        of a number over all of them, who make the same calls."""
        self._agree = least
        self._limit_cache()

    def _limit_cache(self) -> None:
        """Of `cache_bytes` the engine takes what its requests can use."""
        limit = self.cache_bytes_now()
        self._engine.set_max_cache_bytes(limit if self._agree is None else self._agree(limit))

    def cache_bytes_now(self) -> int:
        """What keys and values of an engine on this model may take, of the memory that is free now."""
        return self.cache_bytes(torch.device(getattr(self._runner, "device", "cpu")), self._memory_share)

    def weight_digest(self) -> str:
        """Digest of the weights that the engine reads. RuntimeError when it was made without one."""
        if self._digest is None:
            raise RuntimeError("this NativeGeneration was made without `digest`")
        return self._digest()

    def get_logger_metrics(self) -> dict[str, float]:
        """Sums since `clear_logger_metrics`.

        steps, generated_tokens, prefill_tokens (computed, with those computed again after a preemption), decode_tokens,
        shared_prompt_tokens (not computed thanks to sharing), mean_batch_size (running sequences a step), peak_blocks of
        the cache, preemptions, forward_seconds, sampling_seconds.
        """
        metrics = dict(self._engine.metrics)
        sequence_steps = metrics.pop("sequence_steps")
        return metrics | {"mean_batch_size": sequence_steps / max(metrics["steps"], 1)}

    def clear_logger_metrics(self) -> None:
        """Begins the sums of `get_logger_metrics` again."""
        self._engine.reset_metrics()


class _Prompts(NamedTuple):
    ids: Tensor
    """[sum of lengths] the different prompts, one after the other"""
    offsets: Tensor
    """[prompts + 1]"""
    index: Tensor
    """[B] which prompt a row has"""


def _distinct_prompts(batch: RaggedBatch) -> _Prompts:
    """Equal prompts become one, so that their generations share its prefill."""
    index: dict[tuple[int, ...], int] = {}
    ids, offsets = batch.tokens["input_ids"].tolist(), batch.offsets.tolist()
    rows = [tuple(ids[start:end]) for start, end in pairwise(offsets)]
    chosen = [index.setdefault(row, len(index)) for row in rows]
    sizes = torch.tensor([0] + [len(prompt) for prompt in index])
    flat = torch.tensor([token for prompt in index for token in prompt], dtype=torch.int64)
    return _Prompts(flat, sizes.cumsum(0), torch.tensor(chosen))
