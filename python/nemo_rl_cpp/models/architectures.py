"""The table of architectures: what the layers of a model_type are made of, and what its config.json may leave out."""

from collections.abc import Mapping
from typing import NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain


class Architecture(NamedTuple):
    """A model_type: its name in transformers, what its layers are made of, and what config.json may leave out.

    `norms` names the norms of a layer by their place: before or after attention and MLP (csrc/model/config.h). `qk_norm` is
    "none", "head" or "whole". `biases` are those that it may have: "qkv" always, "attention" by attention_bias, "mlp" by mlp_bias.
    `windows` says which layers see a sliding window: "none", whatever config.json says, "all" where it names one, or "some", by
    use_sliding_window, layer_types and max_window_layers.
    """

    title: str
    defaults: dict[str, Plain]
    biases: tuple[str, ...] = ("attention",)
    qk_norm: str = "none"
    windows: str = "none"
    norms: Mapping[str, str] = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}


# What transformers 5 takes for a key that config.json leaves out.
_EVERY = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {
    **_EVERY, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_LLAMA = {
    **_EVERY,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = {
    **_EVERY, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_OLMO2 = {
    **_EVERY, "vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False,
}  # fmt: skip
SUPPORTED_ARCHITECTURES = {
    "llama": Architecture("Llama", _LLAMA, biases=("attention", "mlp")),
    "mistral": Architecture("Mistral", _MISTRAL, biases=(), windows="all"),
    "olmo2": Architecture(
        "Olmo2", _OLMO2, qk_norm="whole",
        norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    ),
    "qwen2": Architecture("Qwen2", _QWEN, biases=("qkv",), windows="some"),
    "qwen3": Architecture("Qwen3", {**_QWEN, "head_dim": 128, "attention_bias": False}, qk_norm="head", windows="some"),
}  # fmt: skip
"""model_type -> what it is. Another dense architecture is an entry here."""
