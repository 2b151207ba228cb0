"""Reads a Hugging Face config.json into what the native decoder needs, and says no to what it cannot compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}


def read_config(folder: str | Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """The folder's config.json with `policy.hf_config_overrides` applied (new keys are allowed, as transformers does)."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a model folder: it has no config.json (policy.model_name)")
    config = json.loads(path.read_text())
    config.update(overrides or {})
    return config


def native_config(config: dict[str, Any], *, value_head: bool = False) -> dict[str, Any]:
    """The keyword dictionary of the native `DecoderModel`.

    Args:
        config: contents of config.json of a Llama, Qwen2 or Qwen3 model.
        value_head: build a critic: one scalar a token in place of the language-model head.

    Raises:
        ValueError: the architecture or one of its options is not supported; the message names it.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} (architectures {config.get('architectures')}) is not supported by policy.backend=native; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    _refuse_unsupported(config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"head_dim {head_dim} is not supported: the attention kernels need a multiple of 8 up to 256")
    inv_freq, attention_factor = rope_frequencies(config, head_dim)
    llama_bias = kind == "llama" and bool(config.get("attention_bias", False))
    qwen3_bias = kind == "qwen3" and bool(config.get("attention_bias", False))
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)) and not value_head,
        "qkv_bias": kind == "qwen2" or llama_bias or qwen3_bias,
        "output_bias": llama_bias or qwen3_bias,
        "mlp_bias": kind == "llama" and bool(config.get("mlp_bias", False)),
        "qk_norm": "head" if kind == "qwen3" else "none",
        "norms": {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
        "activation": "silu",
        "value_head": value_head,
        "rope_inv_freq": inv_freq,
        "rope_attention_factor": attention_factor,
    }


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported: the native decoder computes silu")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise ValueError("sliding-window attention is not supported: use a model with full attention in every layer")
    if config.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported: use the float32, float16 or bfloat16 weights")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"pretraining_tp {config['pretraining_tp']} is not supported: only 1 is")


def rope_frequencies(config: dict[str, Any], head_dim: int) -> tuple[list[float], float]:
    """Inverse frequencies [H/2] after rope scaling, and the factor that multiplies cos and sin.

    Both spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`. Types: default, linear, llama3
    (Llama 3.1), yarn (Peng et al., 2023).
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    inv_freq = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return inv_freq, 1.0
    factor = float(parameters.get("factor", 1.0))
    if kind == "linear":
        return [f / factor for f in inv_freq], 1.0
    if kind == "llama3":
        return [_llama3(f, parameters, factor) for f in inv_freq], 1.0
    if kind == "yarn":
        return _yarn(inv_freq, parameters, config, theta, head_dim, factor)
    raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _llama3(frequency: float, parameters: dict[str, Any], factor: float) -> float:
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(
    inv_freq: list[float], parameters: dict[str, Any], config: dict[str, Any], theta: float, head_dim: int, factor: float
) -> tuple[list[float], float]:
    original = float(parameters.get("original_max_position_embeddings") or config["max_position_embeddings"])

    def scale(m: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale()

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(parameters.get("beta_fast") or 32)), dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    scaled = []
    for i, frequency in enumerate(inv_freq):
        keep = 1.0 - min(max((i - low) / span, 0.0), 1.0)
        scaled.append(frequency / factor * (1.0 - keep) + frequency * keep)
    return scaled, float(attention_factor)
