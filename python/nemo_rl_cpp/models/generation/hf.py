"""Generation with a transformers module: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.models.generation import base_engine
from nemo_rl_cpp.models.generation.interfaces import OnFinished, Responses
from nemo_rl_cpp.models.hf.outputs import accepts, quietly, transformers

_SHRINK = 4  # a batch is compacted once a quarter of its rows has ended


class HfGeneration(base_engine.BaseEngine):
    """NeMo RL's generation interface for the backend `hf`. It generates with the trainer's own module, read in place.

    The native sampler seeds each token by (seed, stream, draw id, sample index, position), as in the native engine. A
    row's tokens depend on the other rows of its batch only through rounding: the size of the batch sets the shapes of
    the matrix products, and so changes the last bits of the logits."""

    def __init__(
        self,
        module: nn.Module,
        config: GenerationConfig | Mapping[str, object],
        tokenizer: TokenizerType,
        **options: object,
    ) -> None:
        super().__init__(config, tokenizer, **options)
        self.module = module
        self._vocab_size = module.config.get_text_config().vocab_size

    def _respond(self, asked: base_engine.GenerationRequest, on_finished: OnFinished | None) -> Responses:
        if any("" in row for row in asked.stops):
            raise ValueError("stop_strings: an empty text is in every text; leave it out")
        rule = self.sampling_rule(asked.greedy, asked.stream)
        token_bytes = self._token_bytes if any(asked.stops) else []
        work = _Work(asked, self._room(asked), on_finished, rule, self._stop_token_ids, token_bytes)
        with quietly(), torch.no_grad():
            for rows in self._batches(work):
                self._answer(work, rows)
        return work.responses()

    def _batches(self, work: _Work) -> list[list[int]]:
        """Return groups of adjacent rows to generate together: at most max_batch_size rows, and as many as the KV cache
        holds. The distinct prompts of a group, if several, have at most prefill_chunk_tokens tokens with padding."""
        at_once = self.config.max_batch_size or len(work.prompts)
        chunk = self.config.prefill_chunk_tokens
        device, of_token = next(self.module.parameters()).device, self._bytes_per_token
        memory = self.cache_bytes(device) / of_token if of_token else math.inf
        batches: list[list[int]] = []
        longest = total = distinct = 0
        last: Tensor | None = None
        for row, prompt in enumerate(work.prompts):
            if not work.room[row]:
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

    @cached_property
    def _bytes_per_token(self) -> int:
        """Return the bytes that the KV cache needs for each token of a row; 0 if the module has no KV cache."""
        cache, name = _cache(self.module), accepts(self.module, "cache", "past_key_values")
        if cache is None:
            return 0
        ids = torch.zeros(1, 1, dtype=torch.int64, device=_device(self.module))
        with torch.no_grad():
            self.module(input_ids=ids, use_cache=True, **{name: cache})
        parts = (getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values"))
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    def _answer(self, work: _Work, rows: list[int]) -> None:
        """Generate the responses of the rows `rows` in one batch, and append their tokens to `work`."""
        distinct: dict[tuple[int, ...], int] = {}
        index = [distinct.setdefault(tuple(work.prompts[row].tolist()), len(distinct)) for row in rows]
        # a cache with other states (such as Mamba's) would include padding, so such models recompute whole sequences
        decoder = CachedDecoder(self.module) if _cache(self.module) is not None else WholeTextDecoder(self.module)
        logits = decoder.begin([torch.tensor(prompt) for prompt in distinct], torch.tensor(index))
        # rows that have not ended, and their indices in the decoder's batch
        alive, places = list(rows), torch.arange(len(rows))
        while True:
            tokens = self._draw(work, alive, logits[places])
            ended = [work.append(row, token) for row, token in zip(alive, tokens)]
            if not all(ended):
                work.tell([row for row, end in zip(alive, ended) if end])
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
        """Sample the next token of each of the B `rows` from `logits` [B, V], and store its log-probability."""
        places = [len(work.prompts[row]) + len(work.tokens[row]) for row in rows]  # positions of the next tokens
        keys = [(work.stream, work.draws[row], work.samples[row], place) for row, place in zip(rows, places)]
        uniform = torch.tensor([C.random_uniform(self.seed, *key) for key in keys], dtype=torch.float64)
        tokens, logprobs, _ = C.sample_rows(logits.float().cpu().contiguous(), uniform, work.rule)
        tokens = tokens.tolist()
        for row, place, token, logprob in zip(rows, places, tokens, logprobs.tolist()):
            if token < 0:
                raise RuntimeError(
                    f"the model's logits are not finite for draw {work.draws[row]}, sample {work.samples[row]} at position {place}"
                )
            work.logprobs[row].append(logprob)
        return tokens


class _Work(base_engine.ResponseBuffer):
    """The request of one `generate` call, and the tokens generated so far."""

    def __init__(
        self, asked: base_engine.GenerationRequest, room: list[int], on_finished: OnFinished | None, rule: C.SamplingRule, ends: list[int],
        token_bytes: list[bytes],
    ) -> None:  # fmt: skip
        super().__init__(asked.batch.size, on_finished)
        self.prompts = [row.to(torch.int64) for row in asked.batch.rows(asked.batch.tokens["input_ids"])]
        self.room, self.draws, self.samples = room, asked.draws.tolist(), asked.samples.tolist()
        self.stream, self.rule, self.ends = base_engine.STREAMS[asked.stream], rule, ends
        self._stops = [base_engine.StopStrings(stops, token_bytes) for stops in asked.stops]

    def append(self, row: int, token: int) -> bool:
        """Append a token to the response of a row; return whether the response has ended."""
        self.tokens[row].append(token)
        stops = token in self.ends or self._stops[row].end_at(token)
        self.truncated[row] = not stops and len(self.tokens[row]) >= self.room[row]
        return stops or self.truncated[row]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _cache(module: nn.Module) -> object | None:
    """Return an empty KV cache for the module; None if the module has no KV cache, or caches other states, such as
    those of recurrent layers."""
    if accepts(module, "cache", "past_key_values") is None:
        return None
    try:
        cache = transformers().DynamicCache(config=module.config)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    kinds = transformers().cache_utils
    plain = all(type(layer) in (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if plain and not getattr(module, "_is_stateful", False) else None


class CachedDecoder:
    """A decoder with a KV cache, for a batch of sequences. Distinct prompts are padded on the left and prefilled once;
    then each step computes one token per row."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._cache = module, _cache(module)
        self._name = accepts(module, "cache", "past_key_values")
        self._positions = accepts(module, "position_ids") is not None

    def begin(self, prompts: list[Tensor], index: Tensor) -> Tensor:
        """Prefill the prompts. Row r continues prompts[index[r]]. Return the logits [B, V] of the first tokens."""
        device = _device(self._module)
        width = max(len(prompt) for prompt in prompts)
        ids = torch.stack([nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._mask = (torch.arange(width, device=device)[None] >= width - lengths[:, None]).to(torch.int64)
        logits = self._forward(ids, (self._mask.cumsum(-1) - 1).clamp(min=0))
        index = index.to(device)
        self._cache.batch_select_indices(index)
        self._mask, self._next = self._mask[index], lengths[index]
        return logits[index]

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [B], and return the next logits [B, V]; -1 marks a row that has ended, with any logits."""
        tokens = tokens.to(self._mask.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens.clamp(min=0)[:, None], self._next[:, None])
        self._next = self._next + (tokens >= 0)  # ended rows keep their position, as later ones may exceed the maximum
        return logits

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except `rows`, which become rows 0, 1, ..."""
        rows = rows.to(self._mask.device)
        self._cache.batch_select_indices(rows)
        self._mask, self._next = self._mask[rows], self._next[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs: dict[str, object] = {"input_ids": ids, "attention_mask": self._mask, "use_cache": True}
        inputs[self._name] = self._cache
        if self._positions:
            inputs["position_ids"] = positions
        if accepts(self._module, "logits_to_keep") is not None:
            inputs["logits_to_keep"] = 1
        return self._module(**inputs).logits[:, -1]


@dataclass
class WholeTextDecoder:
    """A decoder without a KV cache: it recomputes whole sequences, which is slow but correct for any causal model."""

    _module: nn.Module

    def begin(self, prompts: list[Tensor], index: Tensor) -> Tensor:
        self._texts = [prompts[i] for i in index.tolist()]
        return self._forward()

    def step(self, tokens: Tensor) -> Tensor:
        pairs = zip(self._texts, tokens)
        self._texts = [torch.cat([text, token[None]]) if token >= 0 else text for text, token in pairs]
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self._texts = [self._texts[row] for row in rows.tolist()]

    def _forward(self) -> Tensor:
        device = _device(self._module)
        ids = nn.utils.rnn.pad_sequence(self._texts, batch_first=True).to(device)
        last = torch.tensor([len(text) - 1 for text in self._texts], device=device)
        logits = self._module(input_ids=ids, use_cache=False).logits
        return logits[torch.arange(len(last), device=device), last]
