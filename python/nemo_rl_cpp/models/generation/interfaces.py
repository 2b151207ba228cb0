"""The interface of generation engines (token ids in, token ids out), and the types of a transfer of new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, Protocol, TypedDict

import torch

from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict, RaggedBatch, offsets_of

_AT_ONCE_SECONDS = 1.0


class GenerationDatumSpec(TypedDict):
    """The input of `generate`, one row per response.

    input_ids: int64 [B, S], prompts padded on the right.
    input_lengths: [B] number of tokens of each prompt.
    stop_strings: for each row a list of stop strings or None, in addition to the configuration's stop strings.
    draw_ids: int64 [B] index of the row's prompt within the whole run. Sampling is seeded by it, so that a repeated
        prompt gets new samples. If missing, the engine numbers the prompts itself.
    sample_index: int64 [B] index of the row among the responses to its prompt (0 if missing).
    stream: "train", "val" or "eval", one per row or one for all rows ("train" if missing). Sampling is seeded by it, so
        streams never share random numbers."""

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[str]]
    draw_ids: NotRequired[torch.Tensor]
    sample_index: NotRequired[torch.Tensor]
    stream: NotRequired[list[str] | str]
    __extra__: object


class GenerationOutputSpec(TypedDict):
    """The output of `generate`, padded.

    output_ids: int64 [B, S'] prompt and response, padded on the right.
    generation_lengths: [B] number of tokens of the response.
    unpadded_sequence_lengths: [B] number of tokens of prompt and response.
    logprobs: float32 [B, S'] log-probability of every sampled token under the distribution it was sampled from; 0 on
        prompt and padding.
    truncated: bool [B] whether the response ended at a length limit, not at a stop token or string."""

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]
    __extra__: object


@dataclass
class Responses:
    """The output of `generate` without padding and prompts: N tokens in total.

    Attributes:
        token_ids: int64 [N].
        offsets: int64 [B + 1]: response b is token_ids[offsets[b] : offsets[b + 1]].
        logprobs: float32 [N] of every sampled token under the distribution it was sampled from, or None.
        truncated: bool [B] whether a response ended at a length limit; None if the engine does not report it.
        weight_version: version of the weights of an engine with a separate copy, set by `sync_weights`; otherwise None.
        token_versions: int64 [N] version of the weights that sampled each token, if they could change within a response
            (`WeightChange`); otherwise None."""

    token_ids: torch.Tensor
    offsets: torch.Tensor
    logprobs: torch.Tensor | None
    truncated: torch.Tensor | None
    weight_version: int | None = None
    token_versions: torch.Tensor | None = None

    @classmethod
    def of(cls, outputs: Responses | Mapping[str, torch.Tensor], prompt_lengths: torch.Tensor) -> Responses:
        """Return the responses in a `GenerationOutputSpec` without the prompts, whose lengths are `prompt_lengths` [B].
        If `outputs` is already a `Responses`, return it unchanged."""
        if isinstance(outputs, Responses):
            return outputs
        ids, begins = outputs["output_ids"].cpu(), torch.as_tensor(prompt_lengths).cpu()
        ends = torch.as_tensor(outputs["unpadded_sequence_lengths"]).cpu().clamp(max=ids.shape[1])
        place = torch.arange(ids.shape[1])[None]
        is_new = (place >= begins[:, None]) & (place < ends[:, None])
        truncated = outputs["truncated"].cpu().bool() if "truncated" in outputs else None
        logprobs = outputs["logprobs"].cpu()[is_new] if "logprobs" in outputs else None
        return cls(ids[is_new], offsets_of((ends - begins).clamp(min=0)), logprobs, truncated)

    @property
    def lengths(self) -> torch.Tensor:
        """Return the number of tokens of each response, int64 [B]."""
        return self.offsets.diff()

    def rows(self, of_tokens: torch.Tensor) -> list[torch.Tensor]:
        """Split `of_tokens` [N], one value per response token, into a list of one view per response."""
        return list(of_tokens.split(self.lengths.tolist()))

    def padded(self, prompts: RaggedBatch, pad_token_id: int | None) -> BatchedDataDict[GenerationOutputSpec]:
        """Return the prompts, each followed by its response, as a padded `GenerationOutputSpec`. The padding has the
        token id `pad_token_id`, or 0 if that is None."""
        total = prompts.lengths + self.lengths
        position = torch.arange(int(total.max()))
        is_prompt = position < prompts.lengths.unsqueeze(1)
        is_new = ~is_prompt & (position < total.unsqueeze(1))
        output_ids = torch.full(is_new.shape, 0 if pad_token_id is None else pad_token_id)
        # a mask selects elements row by row, which is the order without padding
        output_ids[is_prompt] = prompts.tokens["input_ids"]
        output_ids[is_new] = self.token_ids
        logprobs = torch.zeros(is_new.shape, dtype=torch.float32)
        logprobs[is_new] = self.logprobs
        return BatchedDataDict(
            output_ids=output_ids, generation_lengths=self.lengths, unpadded_sequence_lengths=total, logprobs=logprobs,
            truncated=self.truncated,
        )  # fmt: skip


PaddedPrompts = BatchedDataDict[GenerationDatumSpec]
Prompts = RaggedBatch | PaddedPrompts
"""The input of an engine. A RaggedBatch has the keys of `GenerationDatumSpec` if it is read as a mapping."""
Answer = Responses | BatchedDataDict[GenerationOutputSpec]
"""The output of an engine: `Responses`, or a padded batch."""
OnFinished = Callable[[list[int], list[list[int]]], None]
"""A callback for responses that have ended. It receives their rows and the token ids of each response."""


class Pause(NamedTuple):
    """The point within responses at which weights can change: after `after_tokens` tokens (at least 2) of each
    response. With `keep_cache` the KV cache computed with the old weights stays in use; otherwise it is recomputed with
    the new weights."""

    after_tokens: int
    keep_cache: bool


@dataclass
class WeightChange:
    """A planned change of the weights within responses, see `DedicatedGeneration`. The first `generate` call with a
    response that reaches the point `pause` stops there, calls `wait`, which blocks until the engines have the new
    weights, sets `done`, and continues."""

    pause: Pause
    wait: Callable[[], None]
    done: bool = False


class GenerationInterface(Protocol):
    """A generation engine. The response of a row depends only on its prompt, its sampling settings and the seed of its
    sampling, never on the other rows of a batch."""

    reports_finished: bool = False
    """Whether `generate` accepts the argument `on_finished` (`OnFinished`)."""
    owns_process: bool
    """Whether the engine owns a process. If so, `shutdown` ends it, and is called at the end of the run."""

    def prepare_for_generation(self) -> bool:
        """Allocate the resources that generation needs. Called before `generate`."""

    def generate(self, data: Prompts, greedy: bool = False, **beside: OnFinished) -> Answer:
        """Return a response per prompt, generated with the weights of the last `sync_weights`. `greedy` means
        temperature 0 and top_k 1.

        The loop passes a RaggedBatch, which can be read as a `GenerationDatumSpec`. The engine may return `Responses`
        or a padded batch. `beside` is empty, or holds `on_finished` (see `BaseEngine.generate`) if the engine sets
        `reports_finished`."""

    def finish_generation(self) -> bool:
        """Release the resources that only generation needs. Called after the last `generate` of a step."""

    def invalidate_kv_cache(self) -> bool:
        """Discard the KV cache after a change of the weights; return whether a cache existed."""

    def weight_digest(self) -> str:
        """Return the digest of the engine's weights, comparable with `PolicyInterface.weight_digest`."""


@contextmanager
def generating(generation: GenerationInterface) -> Iterator[None]:
    """Return a context that calls `prepare_for_generation` at its start and `finish_generation` at its end, also after
    an error or Ctrl-C. Afterwards the engine accepts no requests and holds no KV cache."""
    generation.prepare_for_generation()
    with finished_on_error(generation):
        yield
    generation.finish_generation()


@contextmanager
def finished_on_error(generation: GenerationInterface) -> Iterator[None]:
    """Return a context that calls `finish_generation` if its block raises an error or Ctrl-C interrupts it; otherwise
    the caller must call it. If `finish_generation` fails, too, its error is added as a note. After Ctrl-C
    `finish_generation` runs in a separate thread, for which the context waits one second."""
    try:
        yield
    except Exception as error:
        _finish_after(generation, error)
        raise
    except BaseException as error:
        thread = threading.Thread(target=_finish_after, args=(generation, error), daemon=True, name="finish_generation")
        thread.start()
        thread.join(_AT_ONCE_SECONDS)
        raise


def _finish_after(generation: GenerationInterface, error: BaseException) -> None:
    try:
        generation.finish_generation()
    except Exception as second:
        error.add_note(f"then finish_generation failed, too: {type(second).__name__}: {second}")


def end_engine(generation: GenerationInterface | None) -> None:
    if getattr(generation, "owns_process", False):
        generation.shutdown()


DEFAULT_BUCKET_BYTES = 8_000_000
"""The bytes of a message of weights if `policy.refit_buffer_size_gb` is null. A message that fits in the CPU cache is
copied and hashed faster (tests/benchmarks/bench_refit.py)."""


class RefitRendezvous(NamedTuple):
    """The settings with which trainer rank 0 (as rank 0) and the engines (as ranks 1, 2, ...) connect for refits
    (transfers of weights): `host` and `port` of the TCP store in the run's main process, the number `size` of
    processes, the timeout `deadline` of a message in seconds, the number `bucket_bytes` of bytes of weights per
    message, and whether only changed weights are sent (`delta`)."""

    host: str
    port: int
    size: int
    deadline: float
    bucket_bytes: int
    delta: bool = False


class RefitResult(NamedTuple):
    """The result of a refit in one process: the size of all weights in bytes, the duration in seconds, the digest of
    the weights afterwards, and the size in bytes of the messages that carried the weights."""

    bytes: int
    seconds: float
    digest: str
    sent: int = 0
