"""Where a model's configuration and weights come from: a Hugging Face folder, or a fresh random model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_cpp.models.hf_config import read_config
from nemo_rl_cpp.models.sources import TINY_RANDOM
from nemo_rl_cpp.models.weights import initialize_weights, load_weights

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class ModelFolder:
    """config.json's contents and, unless the model starts random, the folder with its weights."""

    config: dict[str, Any]
    path: Path | None
    seed: int = 0

    def fill(self, model: Any) -> None:
        """Loads or draws the weights of a native `DecoderModel`."""
        if self.path is None:
            initialize_weights(model, self.seed, std=float(self.config.get("initializer_range", 0.02)))
        else:
            load_weights(model, self.path)


def open_model_folder(name: str, overrides: dict[str, Any] | None = None, *, seed: int = 0) -> ModelFolder:
    """`policy.model_name`: "tiny-random" (sizes from `hf_config_overrides`), a folder, or a name that
    `models.sources.resolve_model` finds."""
    if name == TINY_RANDOM:
        return ModelFolder({**TINY_CONFIG, **(overrides or {})}, None, seed)
    from nemo_rl_cpp.models.sources import resolve_model

    path = resolve_model(name)
    return ModelFolder(read_config(path, overrides), path)
