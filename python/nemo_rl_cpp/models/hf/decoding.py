"""Token after token with a module of transformers: with its cache of keys and values, or without where it has no such cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from nemo_rl_cpp.models.hf.library import accepts


class Decoder(Protocol):
    """A batch of texts that grow by a token at a time."""

    def begin(self, prompts: list[Tensor], index: Tensor) -> Tensor:
        """Row r continues prompts[index[r]]. The logits [B, V] of the first new tokens."""

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [B]; the logits [B, V] of those that follow. A row with -1 has ended: it stays as it is, and its logits
        mean nothing."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all but these rows, which are then 0, 1, ..."""


def decoder_of(module: nn.Module) -> Decoder:
    """With a cache where transformers keeps keys and values of attention alone; states of other kinds (Mamba and the like) see
    padding, so that such texts are computed anew for each token."""
    return CachedDecoder(module) if _cache(module) is not None else WholeTextDecoder(module)


def bytes_per_token(module: nn.Module) -> float:
    """What one token of one row takes in the cache; 0 without a cache."""
    cache, name = _cache(module), accepts(module, "cache", "past_key_values")
    if cache is None:
        return 0.0
    with torch.no_grad():
        module(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=_device(module)), use_cache=True, **{name: cache})
    parts = (getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values"))
    return float(sum(part.nbytes for part in parts if isinstance(part, Tensor)))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _cache(module: nn.Module) -> object | None:
    """An empty cache for this module; None where it has none, or one with other states than keys and values."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if accepts(module, "cache", "past_key_values") is None:
        return None
    try:
        cache = DynamicCache(config=module.config)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if plain and not getattr(module, "_is_stateful", False) else None


class CachedDecoder:
    """Prompts are padded on the left and computed once each; then each step computes one token a row."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._cache = module, _cache(module)
        self._name = accepts(module, "cache", "past_key_values")
        self._positions = accepts(module, "position_ids") is not None

    def begin(self, prompts: list[Tensor], index: Tensor) -> Tensor:
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
        tokens = tokens.to(self._mask.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        logits = self._forward(tokens.clamp(min=0)[:, None], self._next[:, None])
        self._next = self._next + (tokens >= 0)  # of ended rows they stay where the architecture has positions for
        return logits

    def keep(self, rows: Tensor) -> None:
        rows = rows.to(self._mask.device)
        self._cache.batch_select_indices(rows)
        self._mask, self._next = self._mask[rows], self._next[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        inputs: dict[str, object] = {
            "input_ids": ids,
            "attention_mask": self._mask,
            "use_cache": True,
            self._name: self._cache,
        }
        if self._positions:
            inputs["position_ids"] = positions
        if accepts(self._module, "logits_to_keep") is not None:
            inputs["logits_to_keep"] = 1
        return self._module(**inputs).logits[:, -1]


class WholeTextDecoder:
    """Each step computes the whole texts, padded on the right: slow, and right for every causal model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def begin(self, prompts: list[Tensor], index: Tensor) -> Tensor:
        self._texts = [prompts[i] for i in index.tolist()]
        return self._forward()

    def step(self, tokens: Tensor) -> Tensor:
        self._texts = [
            torch.cat([text, token[None]]) if token >= 0 else text for text, token in zip(self._texts, tokens)
        ]
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self._texts = [self._texts[row] for row in rows.tolist()]

    def _forward(self) -> Tensor:
        device = _device(self._module)
        ids = nn.utils.rnn.pad_sequence(self._texts, batch_first=True).to(device)
        last = torch.tensor([len(text) - 1 for text in self._texts], device=device)
        logits = self._module(input_ids=ids, use_cache=False).logits
        return logits[torch.arange(len(last), device=device), last]
