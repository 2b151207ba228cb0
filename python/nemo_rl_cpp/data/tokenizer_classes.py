"""Obeys the keys of tokenizer_config.json that change token ids, as the classes of transformers 5 do, which build their own pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

_LLAMA = "LlamaTokenizer"
_BYTE_LEVEL = (
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
    "GPTNeoXTokenizer",
    "CohereTokenizer",
    "CodeGenTokenizer",
)


def obey_settings(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Changes how `backend` splits a text: `split_special_tokens`, and what `tokenizer_class` makes of `add_prefix_space` and `legacy`.

    Other classes take the pipeline of tokenizer.json and read neither.
    """
    from tokenizers import decoders, models, pre_tokenizers

    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    prefix = settings.get("add_prefix_space")
    byte_level = [part for part in _parts(backend.pre_tokenizer) if isinstance(part, pre_tokenizers.ByteLevel)]
    if name in _BYTE_LEVEL:
        for part in byte_level:
            part.add_prefix_space = bool(prefix)
    if name == _LLAMA and isinstance(backend.model, models.BPE) and not byte_level:
        prefix = prefix is None or bool(prefix)
        scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )


def _parts(pre_tokenizer: PreTokenizer | None) -> Iterator[PreTokenizer]:
    """Yields the steps of a pre-tokenizer, sequences flattened."""
    from tokenizers import pre_tokenizers

    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        for part in pre_tokenizer:
            yield from _parts(part)
    elif pre_tokenizer is not None:
        yield pre_tokenizer
