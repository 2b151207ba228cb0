"""Sizes of models, and those of models that people train as their config.json gives them, so that a forecast needs no download."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class ModelSizes:
    """What config.json says about a decoder."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: int = 1
    """MLPs of a layer"""
    experts_per_token: int = 1

    def as_config(self) -> dict[str, object]:
        """The sizes under the names of config.json, of a model without experts."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("experts")}

    def slice(self, count: int) -> ModelSizes:
        """Of one of so many slices (tensor parallelism)."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // count,
            num_attention_heads=self.num_attention_heads // count,
            num_key_value_heads=self.num_key_value_heads // count,
            vocab_size=self.vocab_size // count,
        )

    @property
    def layer_parameters(self) -> int:
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        return attention + 3 * self.experts * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Number of weights; biases and head norms (far below a percent) are left out."""
        return self.num_hidden_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size

    @property
    def backbone_parameters(self) -> int:
        """Without the LM head of an untied model: a value model has a single column there."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.parameters - head + self.hidden_size


class KnownModel(NamedTuple):
    """A model of the hub: its name there, its `model_type`, and its sizes."""

    name: str
    model_type: str
    sizes: ModelSizes


KNOWN_MODELS = (
    KnownModel("HuggingFaceTB/SmolLM2-135M", "llama", ModelSizes(576, 1536, 30, 9, 3, 64, 49152, True)),
    KnownModel("HuggingFaceTB/SmolLM2-360M", "llama", ModelSizes(960, 2560, 32, 15, 5, 64, 49152, True)),
    KnownModel("HuggingFaceTB/SmolLM2-1.7B", "llama", ModelSizes(2048, 8192, 24, 32, 32, 64, 49152, True)),
    KnownModel("TinyLlama/TinyLlama-1.1B", "llama", ModelSizes(2048, 5632, 22, 32, 4, 64, 32000, False)),
    KnownModel("meta-llama/Llama-3.2-1B", "llama", ModelSizes(2048, 8192, 16, 32, 8, 64, 128256, True)),
    KnownModel("meta-llama/Llama-3.2-3B", "llama", ModelSizes(3072, 8192, 28, 24, 8, 128, 128256, True)),
    KnownModel("meta-llama/Llama-3.1-8B", "llama", ModelSizes(4096, 14336, 32, 32, 8, 128, 128256, False)),
    KnownModel("mistralai/Mistral-7B", "mistral", ModelSizes(4096, 14336, 32, 32, 8, 128, 32768, False)),
    KnownModel("allenai/OLMo-2-0425-1B", "olmo2", ModelSizes(2048, 8192, 16, 16, 16, 128, 100352, False)),
    KnownModel("allenai/OLMo-2-1124-7B", "olmo2", ModelSizes(4096, 11008, 32, 32, 32, 128, 100352, False)),
    KnownModel("allenai/OLMo-2-1124-13B", "olmo2", ModelSizes(5120, 13824, 40, 40, 40, 128, 100352, False)),
    KnownModel("Qwen/Qwen2.5-0.5B", "qwen2", ModelSizes(896, 4864, 24, 14, 2, 64, 151936, True)),
    KnownModel("Qwen/Qwen2.5-1.5B", "qwen2", ModelSizes(1536, 8960, 28, 12, 2, 128, 151936, True)),
    KnownModel("Qwen/Qwen2.5-3B", "qwen2", ModelSizes(2048, 11008, 36, 16, 2, 128, 151936, True)),
    KnownModel("Qwen/Qwen2.5-7B", "qwen2", ModelSizes(3584, 18944, 28, 28, 4, 128, 152064, False)),
    KnownModel("Qwen/Qwen2.5-14B", "qwen2", ModelSizes(5120, 13824, 48, 40, 8, 128, 152064, False)),
    KnownModel("Qwen/Qwen2.5-32B", "qwen2", ModelSizes(5120, 27648, 64, 40, 8, 128, 152064, False)),
    KnownModel("Qwen/Qwen2.5-Math-1.5B", "qwen2", ModelSizes(1536, 8960, 28, 12, 2, 128, 151936, True)),
    KnownModel("Qwen/Qwen2.5-Math-7B", "qwen2", ModelSizes(3584, 18944, 28, 28, 4, 128, 152064, False)),
    KnownModel(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", ModelSizes(1536, 8960, 28, 12, 2, 128, 151936, False)
    ),
    KnownModel(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", ModelSizes(3584, 18944, 28, 28, 4, 128, 152064, False)
    ),
    KnownModel("Qwen/Qwen3-0.6B", "qwen3", ModelSizes(1024, 3072, 28, 16, 8, 128, 151936, True)),
    KnownModel("Qwen/Qwen3-1.7B", "qwen3", ModelSizes(2048, 6144, 28, 16, 8, 128, 151936, True)),
    KnownModel("Qwen/Qwen3-4B", "qwen3", ModelSizes(2560, 9728, 36, 32, 8, 128, 151936, True)),
    KnownModel("Qwen/Qwen3-8B", "qwen3", ModelSizes(4096, 12288, 36, 32, 8, 128, 151936, False)),
    KnownModel("Qwen/Qwen3-14B", "qwen3", ModelSizes(5120, 17408, 40, 40, 8, 128, 151936, False)),
    KnownModel("Qwen/Qwen3-32B", "qwen3", ModelSizes(5120, 25600, 64, 64, 8, 128, 151936, False)),
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
