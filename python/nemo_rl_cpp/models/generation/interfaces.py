"""The contract between rollouts and a generation engine: token ids in, token ids out; and what trainer and engines say
of a refit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, Protocol, TypedDict

import torch

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of

_AT_ONCE_SECONDS = 1.0


class GenerationDatumSpec(TypedDict):
    """What `generate` takes.

    input_ids: int64 [B, S], prompts padded on the right.
    input_lengths: [B] tokens of each prompt.
    stop_strings: [B] a list of stop strings, or None, for each sample; they add to those of the configuration.
    draw_ids: int64 [B] counts prompts over the whole run: part of the key of every random draw, so that a prompt that
        comes twice gets fresh samples. Counted by the engine itself when missing.
    sample_index: int64 [B] which of the generations of its prompt a row is (0 when missing).
    stream: "train", "val" or "eval", one a row or one for all ("train" when missing): streams never share draws.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[str]]
    draw_ids: NotRequired[torch.Tensor]
    sample_index: NotRequired[torch.Tensor]
    stream: NotRequired[list[str] | str]
    __extra__: object


class GenerationOutputSpec(TypedDict):
    """What `generate` gives.

    output_ids: int64 [B, S'] prompt and response, padded on the right.
    generation_lengths: [B] tokens of the response.
    unpadded_sequence_lengths: [B] tokens of prompt and response.
    logprobs: float32 [B, S'] log-probability of every sampled token under the distribution it was drawn from; 0 on
        prompt and padding.
    truncated: bool [B] whether the response ended for want of room, not by a stop token or string.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]
    __extra__: object


@dataclass
class Responses:
    """What `generate` gives for prompts without padding: the responses alone, one after the other, N tokens in all.

    Attributes:
        token_ids: int64 [N].
        offsets: int64 [B + 1]: response b is token_ids[offsets[b] : offsets[b + 1]].
        logprobs: float32 [N] of every sampled token under the distribution it was drawn from; None where the engine has none.
        truncated: bool [B] whether a response ended for want of room; None where the engine does not say so.
        weight_version: of the weights that generated them, as `sync_weights` gave it to an engine with weights of its
        own; else None.
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor
    logprobs: torch.Tensor | None
    truncated: torch.Tensor | None
    weight_version: int | None = None

    @classmethod
    def of(cls, outputs: Responses | Mapping[str, torch.Tensor], prompt_lengths: torch.Tensor) -> Responses:
        """Make responses from a `GenerationOutputSpec`, whose rows begin with prompts of `prompt_lengths` [B]."""
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
        """int64 [B]."""
        return self.offsets.diff()

    def rows(self, of_tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each response, as views."""
        return list(of_tokens.split(self.lengths.tolist()))

    def padded(self, prompts: RaggedBatch, pad_token_id: int | None) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a `GenerationOutputSpec` with the prompts that were answered."""
        total = prompts.lengths + self.lengths
        position = torch.arange(int(total.max()))
        is_prompt = position < prompts.lengths.unsqueeze(1)
        is_new = ~is_prompt & (position < total.unsqueeze(1))
        output_ids = torch.full(is_new.shape, 0 if pad_token_id is None else pad_token_id)
        # masks select row after row, which is the ragged order
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
"""What an engine takes; a RaggedBatch, as a mapping, has the names of `GenerationDatumSpec`, too."""
Answer = Responses | BatchedDataDict[GenerationOutputSpec]
"""What an engine gives: `Responses` for a RaggedBatch, or padded."""
OnFinished = Callable[[list[int], list[list[int]]], None]
"""Is told of responses as they end: their rows, and the token ids of each."""


class GenerationInterface(Protocol):
    """A generation engine. What a row yields depends on its prompt, its sampling settings and its random key alone, never on
    the rest of the batch."""

    reports_finished: bool = False
    """Whether `generate` takes `on_finished` (`OnFinished`)."""
    owns_process: bool
    """Whether the engine has a process that its `shutdown` ends; the end of a run calls it then."""

    def prepare_for_generation(self) -> bool:
        """Make room for generation. Called before `generate`."""

    def generate(self, data: Prompts, greedy: bool = False, **beside: OnFinished) -> Answer:
        """Return a response for every prompt, under the weights of the last `sync_weights`. Greedy: temperature 0, top_k 1.

        The loop gives a RaggedBatch, which as a mapping is a `GenerationDatumSpec`; an engine may answer either way.
        `beside` is `on_finished` for engines that say `reports_finished`, and empty for all others.
        """

    def finish_generation(self) -> bool:
        """Give back what only generation needs. Called after the last `generate` of a step."""

    def invalidate_kv_cache(self) -> bool:
        """Forget cached keys and values, since the weights are new; return whether there was such a cache."""

    def weight_digest(self) -> str:
        """Return the digest of the weights that the engine reads, comparable with `PolicyInterface.weight_digest`."""


@contextmanager
def generating(generation: GenerationInterface) -> Iterator[None]:
    """Call `prepare_for_generation` on entering and `finish_generation` on leaving, also after an error or Ctrl-C: an engine
    takes no requests and holds no cache then."""
    generation.prepare_for_generation()
    with finished_on_error(generation):
        yield
    generation.finish_generation()


@contextmanager
def finished_on_error(generation: GenerationInterface) -> Iterator[None]:
    """Call `finish_generation` after an error or Ctrl-C; without one, the caller does.

    An error of `finish_generation` does not hide the first one, but is a note of it. After Ctrl-C, which may end the program
    within seconds, it continues in another thread where it needs longer than a second.
    """
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
    """End the process of an engine, if it has one."""
    if getattr(generation, "owns_process", False):
        generation.shutdown()


DEFAULT_BUCKET_BYTES = 8_000_000
"""Of `policy.refit_buffer_size_gb: null`. A bucket that stays in the cache is copied and digested faster
(tests/benchmarks/bench_refit.py)."""


class RefitRendezvous(NamedTuple):
    """Where rank 0 of the trainers (rank 0 here) and the engines (1, 2, ...) meet.

    Attributes:
        host, port: of the TCP store that the run's own process holds.
        size: of all who meet.
        deadline: seconds that one message may take.
        bucket_bytes: weights of one message.
        delta: only what has changed since the last refit is sent.
    """

    host: str
    port: int
    size: int
    deadline: float
    bucket_bytes: int
    delta: bool = False


class RefitResult(NamedTuple):
    """What a refit came to for one process: bytes of weights, seconds, the digest of the weights that it has afterwards, and the
    bytes of the messages that carried them."""

    bytes: int
    seconds: float
    digest: str
    sent: int = 0
