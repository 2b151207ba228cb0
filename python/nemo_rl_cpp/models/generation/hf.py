"""Generation with a module of transformers: token ids in, token ids out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
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
from nemo_rl_cpp.models.hf.decoding import Decoder, bytes_per_token, decoder_of
from nemo_rl_cpp.models.hf.library import quietly

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationOutputSpec

Finished = Callable[[list[int], list[list[int]]], None]
_SHRINK = 4  # a batch gives the room of ended rows back once they are a quarter of it


class HfGeneration(EngineSettings, GenerationInterface):
    """NeMo RL's generation interface on the trainer's own module.

    A token is drawn by the native sampler with the key (seed, stream, draw id, sample, position), as the native engine draws it.
    What a row yields therefore depends on the other rows by rounding alone: they change the shapes of the matrix products, and
    with that a last bit of the logits. The token or the text that ends a response stays part of it.

    Args:
        module: the trainer's; it is read in place.
        config: section `policy.generation`. Read are max_new_tokens, temperature, top_p, top_k, val_temperature, val_top_p, val_top_k,
            stop_token_ids, stop_strings, max_batch_size, prefill_chunk_tokens, kv_cache_gb and vllm_cfg.max_model_len.
        tokenizer, end_token_ids, max_model_len, seed: as of `EngineSettings`.
        digest: gives a digest of the weights that the engine reads.
        memory_share: the part of this machine's free memory that this engine may count on.

    Raises ValueError for unknown keys and for values that cannot be.
    """

    reports_finished = True
    owns_process = False

    def __init__(
        self, module: nn.Module, config: EvalGenerationConfig | Mapping[str, object], tokenizer: TokenizerType, *,
        end_token_ids: Sequence[int] | None = None, max_model_len: int | None = None, seed: int = 42,
        digest: Callable[[], str] | None = None, memory_share: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(config, tokenizer, end_token_ids=end_token_ids, max_model_len=max_model_len, seed=seed)
        self.module = module
        self._digest, self._memory_share = digest, memory_share
        self._vocab_size = module.config.get_text_config().vocab_size
        self._token_bytes: list[bytes] | None = None
        self._bytes_per_token: float | None = None
        self.sampling_rule(greedy=False, stream="train")  # reports bad values now rather than at the first step

    def generate(
        self, data: RaggedBatch | BatchedDataDict[GenerationDatumSpec], greedy: bool = False, on_finished: Finished | None = None
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:  # fmt: skip
        """A response for every row, as `NativeGeneration.generate` gives it.

        Raises ValueError for rows that do not fit their lengths, unknown streams, or rows of several streams at once;
        RuntimeError when the model's logits are not finite.
        """
        batch = data if isinstance(data, RaggedBatch) else ragged_prompts(data)
        stream = the_stream(data.get("stream"), batch.size)
        prompts = [row.to(torch.int64) for row in batch.rows(batch.tokens["input_ids"])]
        room = self.max_new_tokens(batch.lengths)
        if self.max_model_len:
            room = torch.minimum(room, self.max_model_len - batch.lengths).clamp(min=0)
        work = _Work(
            prompts, room.tolist(), self.draw_ids(data.get("draw_ids"), batch.size).tolist(),
            row_integers("sample_index", data.get("sample_index", torch.zeros(batch.size)), batch.size).tolist(),
            self._stop_bytes(data.get("stop_strings"), batch.size), self.seed, STREAMS[stream], self.sampling_rule(greedy, stream),
        )  # fmt: skip
        with quietly(), torch.no_grad():
            for rows in self._batches(work):
                self._answer(work, rows, on_finished)
        responses = work.responses()
        return responses if batch is data else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    def _stop_bytes(self, per_row: Sequence[str | Sequence[str] | None] | None, rows: int) -> list[tuple[bytes, ...]]:
        texts = [tuple(text.encode() for text in row) for row in self.stop_texts(per_row, rows)]
        if any(b"" in row for row in texts):
            raise ValueError("stop_strings: an empty text is in every text; leave it out")
        if any(texts) and self._token_bytes is None:
            self._token_bytes = token_bytes_table(self.tokenizer, self._vocab_size)
        return texts

    def _batches(self, work: _Work) -> list[list[int]]:
        """Rows that are generated at the same time: neighbours, so that those of one prompt meet; no more than max_batch_size, than the
        memory for keys and values holds, and, of several different prompts, than prefill_chunk_tokens lets be computed at once."""
        at_once = get_setting(self.config, "max_batch_size") or len(work.prompts)
        chunk = get_setting(self.config, "prefill_chunk_tokens") or DEFAULT_CHUNK
        memory = self._cache_tokens()
        batches: list[list[int]] = []
        longest = total = distinct = 0
        last: Tensor | None = None
        for row, prompt in enumerate(work.prompts):
            if not work.room[row]:
                work.truncated[row] = True
                continue
            same = last is not None and torch.equal(last, prompt)
            size, most = max(longest, len(prompt)), max(total, len(prompt) + work.room[row])
            count = len(batches[-1]) + 1 if batches else 1
            fits = count <= at_once and count * most <= memory and (same or (distinct + 1) * size <= chunk)
            if batches and fits:
                batches[-1].append(row)
                longest, total, distinct = size, most, distinct + (not same)
            else:
                batches.append([row])
                longest, total, distinct = len(prompt), len(prompt) + work.room[row], 1
            last = prompt
        return batches

    def _cache_tokens(self) -> float:
        """How many tokens' keys and values may lie in memory."""
        if self._bytes_per_token is None:
            self._bytes_per_token = bytes_per_token(self.module)
        if not self._bytes_per_token:
            return float("inf")
        device = next(self.module.parameters()).device
        return self.cache_bytes(device, self._memory_share) / self._bytes_per_token

    def _answer(self, work: _Work, rows: list[int], on_finished: Finished | None) -> None:
        """The responses of `rows`, all at the same time."""
        distinct: dict[tuple[int, ...], int] = {}
        index = [distinct.setdefault(tuple(work.prompts[row].tolist()), len(distinct)) for row in rows]
        decoder: Decoder = decoder_of(self.module)
        logits = decoder.begin([torch.tensor(prompt) for prompt in distinct], torch.tensor(index))
        alive, places = list(rows), torch.arange(len(rows))  # what is not ended, and its row of the decoder's batch
        while True:
            tokens = self._draw(work, alive, logits[places])
            ended = [
                work.append(row, token, self._stop_token_ids, self._token_bytes) for row, token in zip(alive, tokens)
            ]
            if on_finished is not None and any(ended) and not all(ended):
                done = [row for row, end in zip(alive, ended) if end]
                on_finished(done, [list(work.tokens[row]) for row in done])
            going = torch.tensor([not end for end in ended])
            alive = [row for row, end in zip(alive, ended) if not end]
            if not alive:
                return
            next_tokens = torch.full((len(logits),), -1)
            next_tokens[places[going]] = torch.tensor(tokens)[going]
            places = places[going]
            if len(logits) - len(places) >= max(1, len(logits) // _SHRINK):
                decoder.keep(places)
                next_tokens, places = next_tokens[places], torch.arange(len(places))
            logits = decoder.step(next_tokens)

    def _draw(self, work: _Work, rows: list[int], logits: Tensor) -> list[int]:
        """The next token of each row; its log-probability goes into `work`."""
        uniform = torch.tensor([work.uniform(row) for row in rows], dtype=torch.float64)
        tokens, logprobs, _ = C.sample_rows(logits.float().cpu().contiguous(), uniform, work.rule)
        tokens = tokens.tolist()
        for row, token, logprob in zip(rows, tokens, logprobs.tolist()):
            if token < 0:
                raise RuntimeError(
                    f"the model's logits are not finite for draw {work.draws[row]}, sample {work.samples[row]} at position {work.length(row)}"
                )
            work.logprobs[row].append(logprob)
        return tokens

    # ---- memory and weights

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Nothing to do: the weights are in place, and a batch makes its own cache."""
        return True

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Nothing to do: the cache went with its batch."""
        return True

    def shutdown(self) -> bool:
        """Nothing to give back. Safe to call twice."""
        return True

    def invalidate_kv_cache(self) -> bool:
        """Nothing to forget: every `generate` begins with an empty cache."""
        return True

    def weight_digest(self) -> str:
        """Digest of the weights that the engine reads. RuntimeError when it was made without one."""
        if self._digest is None:
            raise RuntimeError("this HfGeneration was made without `digest`")
        return self._digest()


class _Work:
    """What one `generate` call was asked for, and what has been generated."""

    def __init__(
        self, prompts: list[Tensor], room: list[int], draws: list[int], samples: list[int], stop_texts: list[tuple[bytes, ...]],
        seed: int, stream: int, rule: C.SamplingRule,
    ) -> None:  # fmt: skip
        self.prompts, self.room, self.draws, self.samples, self.stop_texts = prompts, room, draws, samples, stop_texts
        self.seed, self.stream, self.rule = seed, stream, rule
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.truncated = [False] * len(prompts)
        self._tails = [b""] * len(prompts)

    def length(self, row: int) -> int:
        """Tokens of prompt and response so far: the position of the next one."""
        return len(self.prompts[row]) + len(self.tokens[row])

    def uniform(self, row: int) -> float:
        """The number in [0, 1) that decides about the next token of a row; of its own key alone."""
        return C.random_uniform(self.seed, self.stream, self.draws[row], self.samples[row], self.length(row))

    def append(self, row: int, token: int, ends: Sequence[int], token_bytes: list[bytes] | None) -> bool:
        """Whether the response of a row ends with this token."""
        self.tokens[row].append(token)
        if token in ends or (self.stop_texts[row] and self._stops(row, token_bytes[token])):
            return True
        self.truncated[row] = len(self.tokens[row]) >= self.room[row]
        return self.truncated[row]

    def _stops(self, row: int, added: bytes) -> bool:
        text, longest = self._tails[row] + added, max(map(len, self.stop_texts[row]))
        self._tails[row] = text[-(longest - 1) :] if longest > 1 else b""
        return any(stop in text for stop in self.stop_texts[row])

    def responses(self) -> Responses:
        flat = [token for row in self.tokens for token in row]
        logprobs = [value for row in self.logprobs for value in row]
        lengths = torch.tensor([len(row) for row in self.tokens])
        return Responses(
            torch.tensor(flat, dtype=torch.int64), offsets_of(lengths), torch.tensor(logprobs, dtype=torch.float32),
            torch.tensor(self.truncated),
        )  # fmt: skip
