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


_OF_MODELS = {
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2"),
    "GPTNeoXTokenizer": ("gpt_neox", "olmo", "olmoe", "mamba", "mamba2", "mpt", "falcon_mamba"),
    "CohereTokenizer": ("cohere", "cohere2"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
_OVERRULES = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # whose folders often name a wrong class


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class that transformers 5 takes for a folder: the one that tokenizer_config.json (`settings`) or
    config.json names, or else, and for some kinds of models always, the one of the `model_type`."""
    kind = config.get("model_type")
    of_model = next((name for name, kinds in _OF_MODELS.items() if kind in kinds), None)
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return of_model if of_model and (not named or kind in _OVERRULES) else named


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
