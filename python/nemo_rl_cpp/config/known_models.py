"""Sizes of models that people train, as their config.json gives them, so that a forecast needs no download."""

from __future__ import annotations

import re
from typing import NamedTuple


class KnownModel(NamedTuple):
    """A model of the hub: its name there, its `model_type`, and its sizes."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def as_config(self) -> dict[str, object]:
        """The sizes under the names of config.json."""
        return {name: value for name, value in self._asdict().items() if name not in ("name", "model_type")}


KNOWN_MODELS = (
    KnownModel("HuggingFaceTB/SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    KnownModel("HuggingFaceTB/SmolLM2-360M", "llama", 960, 2560, 32, 15, 5, 64, 49152, True),
    KnownModel("HuggingFaceTB/SmolLM2-1.7B", "llama", 2048, 8192, 24, 32, 32, 64, 49152, True),
    KnownModel("TinyLlama/TinyLlama-1.1B", "llama", 2048, 5632, 22, 32, 4, 64, 32000, False),
    KnownModel("meta-llama/Llama-3.2-1B", "llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    KnownModel("meta-llama/Llama-3.2-3B", "llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    KnownModel("meta-llama/Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    KnownModel("mistralai/Mistral-7B", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, False),
    KnownModel("allenai/OLMo-2-0425-1B", "olmo2", 2048, 8192, 16, 16, 16, 128, 100352, False),
    KnownModel("allenai/OLMo-2-1124-7B", "olmo2", 4096, 11008, 32, 32, 32, 128, 100352, False),
    KnownModel("allenai/OLMo-2-1124-13B", "olmo2", 5120, 13824, 40, 40, 40, 128, 100352, False),
    KnownModel("Qwen/Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    KnownModel("Qwen/Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    KnownModel("Qwen/Qwen2.5-3B", "qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    KnownModel("Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    KnownModel("Qwen/Qwen2.5-14B", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    KnownModel("Qwen/Qwen2.5-32B", "qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
    KnownModel("Qwen/Qwen2.5-Math-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    KnownModel("Qwen/Qwen2.5-Math-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    KnownModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, False),
    KnownModel("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    KnownModel("Qwen/Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    KnownModel("Qwen/Qwen3-1.7B", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    KnownModel("Qwen/Qwen3-4B", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    KnownModel("Qwen/Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    KnownModel("Qwen/Qwen3-14B", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    KnownModel("Qwen/Qwen3-32B", "qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
)
_VARIANT = re.compile(r"-(base|instruct|chat(-v[\d.]+)?|v0\.[123]|it|sft|dpo|coder|thinking-2507|instruct-2507)$")


def known_model(name: str) -> KnownModel | None:
    """The model of a hub name, with or without its owner; variants such as -Instruct have the same sizes. None: not known."""
    owner, _, short = name.lower().rpartition("/")
    short = short.replace("mistral-7b-v0.3", "mistral-7b").replace("mistral-7b-instruct-v0.3", "mistral-7b")
    while short:
        for model in KNOWN_MODELS:
            known = model.name.lower()
            if short == known.rpartition("/")[2] and owner in ("", known.rpartition("/")[0]):
                return model
        shorter = _VARIANT.sub("", short)
        if shorter == short:
            return None
        short = shorter
    return None
