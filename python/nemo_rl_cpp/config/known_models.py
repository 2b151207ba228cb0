"""Sizes of models, and those of models that people train as their config.json gives them, so that a forecast needs no download."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
    fused_tensors: bool = False
    """q, k, v and gate, up are one matrix each"""

    def as_config(self) -> dict[str, object]:
        """The sizes under the names of config.json, of a model without experts."""
        return {name: value for name, value in asdict(self).items() if not name.startswith(("experts", "fused"))}

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


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN_MODELS = tuple(
    KnownModel(name, model_type, ModelSizes(*sizes))
    for model_type, rows in _TABLE.items()
    for name, sizes in rows.items()
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
