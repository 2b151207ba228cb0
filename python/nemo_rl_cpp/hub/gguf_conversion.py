"""Convert the metadata of a GGUF file (ggml's docs/gguf.md) to a Hugging Face folder: config.json and, by
`hub.gguf_tokenizer`, the tokenizer.

transformers' converter is not used, because it takes 4 s to import and would add a dependency to the extra `smollm2`.
`models.gguf_weights` reads the tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFReader
from safetensors.numpy import save_file

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.gguf_tokenizer import UnsupportedGgufError, value, write_tokenizer
from nemo_rl_cpp.stages import work

_KINDS = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "mistral3": ("ministral3", "Ministral3"),
    "smollm3": ("smollm3", "SmolLM3"),
    "granite": ("granite", "Granite"),
    "granitemoe": ("granitemoe", "GraniteMoe"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybrid"),
    "olmo2": ("olmo2", "Olmo2"),
    "exaone4": ("exaone4", "Exaone4"),
    "glm4": ("glm4", "Glm4"),
    "ernie4_5": ("ernie4_5", "Ernie4_5"),
    "seed_oss": ("seed_oss", "SeedOss"),
    "qwen3moe": ("qwen3_moe", "Qwen3Moe"),
    "qwen2moe": ("qwen2_moe", "Qwen2Moe"),
    "olmoe": ("olmoe", "Olmoe"),
    "glm4moe": ("glm4_moe", "Glm4Moe"),
    "deepseek2": ("deepseek_v3", "DeepseekV3"),
    "gpt-oss": ("gpt_oss", "GptOss"),
    "phi3": ("phi3", "Phi3"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3_text", "Gemma3"),
    "gemma4": ("gemma4_text", "Gemma4"),
    "nemotron_h": ("nemotron_h", "NemotronH"),
    "nemotron_h_moe": ("nemotron_h", "NemotronH"),
    "lfm2": ("lfm2", "Lfm2"),
    "lfm2moe": ("lfm2_moe", "Lfm2Moe"),
    "qwen35": ("qwen3_5_text", "Qwen3_5"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5Moe"),
    "qwen3next": ("qwen3_next", "Qwen3Next"),
}
"""Architecture in GGUF -> model_type and prefix of the class name in config.json."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers that identifies a Gemma of 27B parameters, whose attention scale differs."""
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RECURRENT_AND_EXPERTS = {
    "feed_forward_length": "intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "expert_shared_count": "n_shared_experts",
    "moe_latent_size": "moe_latent_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "shortconv.l_cache": "conv_L_cache",
}
"""Optional keys of files of models with recurrent layers, experts or latent attention -> keys of config.json."""
RENAMED = {
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), {"num_dense_layers": "first_k_dense_replace"}),
    "gemma4_text": {"num_experts_per_tok": "top_k_experts"},
    "granitemoehybrid": {
        "linear_conv_kernel_dim": "mamba_d_conv", "linear_key_head_dim": "mamba_d_state", "linear_num_key_heads": "mamba_n_groups",
        "linear_num_value_heads": "mamba_n_heads", "linear_value_head_dim": "mamba_d_head",
        "shared_expert_intermediate_size": "shared_intermediate_size",
    },
    "nemotron_h": {
        "linear_conv_kernel_dim": "conv_kernel", "linear_key_head_dim": "ssm_state_size", "linear_num_key_heads": "n_groups",
        "linear_num_value_heads": "mamba_num_heads", "linear_value_head_dim": "mamba_head_dim",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    },
}  # fmt: skip
"""model_type -> {a key of config.json in `RECURRENT_AND_EXPERTS`: the key in this model_type's config.json}."""
NORM_TOPK_PROB = {"qwen3_moe": True, "lfm2_moe": True, "qwen2_moe": False, "olmoe": False}
"""model_type -> the value of norm_topk_prob that llama.cpp computes with; other mixtures always renormalise."""
NUMBERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_weights_scale": "routed_scaling_factor",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
"""Optional keys of the file -> keys of config.json. Both have the same value."""


def _short(number: float) -> float:
    """Return the decimal number that the file's author stored as float32: 1e-5 for the stored 9.99999974e-06."""
    return float(str(np.float32(number)))


def _kind(reader: GGUFReader) -> tuple[str, str]:
    """Return the model's model_type and the prefix of its class name. Raise UnsupportedGgufError for a file that cannot
    be converted."""
    if reader.endianess == gguf.GGUFEndian.BIG:
        raise UnsupportedGgufError("the GGUF file is for big-endian machines: take the little-endian one")
    if (parts := value(reader, "split.count", 1)) > 1:
        raise UnsupportedGgufError(
            f"the GGUF file is one of {parts} parts of a model: join them with llama.cpp's `llama-gguf-split --merge`"
        )
    architecture = str(value(reader, "general.architecture"))
    if architecture not in _KINDS:
        read = ", ".join(_KINDS)
        raise UnsupportedGgufError(
            f"the GGUF file holds a model of the architecture {architecture!r}, which is not read; {read} are"
        )
    if architecture == "llama" and value(reader, "{arch}.expert_count"):
        return "mixtral", "Mixtral"
    if architecture == "mistral3" and value(reader, "{arch}.rope.scaling.type") != "yarn":
        return "mistral", "Mistral"  # Mistral Small 3
    if architecture == "olmo2" and value(reader, "{arch}.attention.sliding_window"):
        return "olmo3", "Olmo3"
    return _KINDS[architecture]


def _add_sizes(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set in `config` the numbers and sizes of layers, heads and experts."""
    model_type = config["model_type"]
    for source, name in CONFIG_KEYS.items():
        if model_type != "qwen3_5_moe_text" or source != "feed_forward_length":  # experts alone have no such length
            default = config.get("num_attention_heads") if source == "attention.head_count_kv" else None
            number = value(reader, f"{{arch}}.{source}", default)
            if isinstance(number, Sequence) and model_type == "gemma4_text":  # layers differ (_add_gemma4)
                number = number[0]
            elif isinstance(number, Sequence):
                if source == "attention.head_count_kv":  # layers without attention have no keys
                    others = "conv" if model_type.startswith("lfm2") else "linear_attention"
                    config["layer_types"] = ["full_attention" if each else others for each in number]
                number = max(number)
            config[name] = int(number)
    for source, name in RECURRENT_AND_EXPERTS.items():
        number = value(reader, f"{{arch}}.{source}")
        if isinstance(number, int) and (number or source == "leading_dense_block_count"):
            config[name] = number
    # multi-token-prediction layers, which are not computed, are the last ones
    config["num_hidden_layers"] -= int(value(reader, "{arch}.nextn_predict_layers", 0))
    if model_type in NORM_TOPK_PROB:
        config["norm_topk_prob"] = NORM_TOPK_PROB[model_type]
    if value(reader, "{arch}.ssm.inner_size"):
        _add_recurrence(reader, config)
    for name, renamed in RENAMED.get(model_type, {}).items():
        if name in config:
            config[renamed] = config.pop(name)
    if model_type in ("granitemoehybrid", "nemotron_h"):
        _add_layers_with_mamba2(reader, config)
    if model_type in ("deepseek_v3", "glm4_moe", "nemotron_h"):
        _add_router(reader, config)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = int(value(reader, "{arch}.attention.key_length", head_dim))
    rotary = value(reader, "{arch}.rope.dimension_count") or config["head_dim"]
    if model_type == "gemma4_text":
        _add_gemma4(reader, config)
    elif model_type == "deepseek_v3":
        _add_latent(reader, config, rotary)
    # the default of GLM is a half, and Nemotron-H has no RoPE
    elif model_type in ("glm4", "glm4_moe") or (rotary < config["head_dim"] and model_type != "nemotron_h"):
        config["partial_rotary_factor"] = rotary / config["head_dim"]


def _add_layers_with_mamba2(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set in `config` the kinds of layers, and keys of MLPs and RoPE, of Granite 4 or Nemotron-H."""
    if config["model_type"] == "granitemoehybrid":
        config["mamba_expand"] = config["mamba_n_heads"] * config["mamba_d_head"] // config["hidden_size"]
        config.setdefault("num_experts", 0)
        config.setdefault("shared_intermediate_size", config["intermediate_size"])
        config["position_embedding_type"] = "rope" if value(reader, "{arch}.rope.scaling.finetuned", True) else None
        return
    mlp = "moe" if config.get("num_experts") else "mlp"
    widths = value(reader, "{arch}.feed_forward_length")
    kinds = [mlp if width else kind for width, kind in zip(widths, config.pop("layer_types"))]
    config["layers_block_type"] = kinds[: config["num_hidden_layers"]]


def _add_latent(reader: GGUFReader, config: dict[str, Plain], rotary: int) -> None:
    """Set in `config` the sizes of the latent attention of DeepSeek-V3, of which `rotary` dimensions are rotated."""
    keys, values = (  # older files have no lengths "mla", as they hold no compressed keys and values
        value(reader, f"{{arch}}.attention.{name}_length_mla", value(reader, f"{{arch}}.attention.{name}_length"))
        for name in ("key", "value")
    )
    config |= {"qk_rope_head_dim": rotary, "qk_nope_head_dim": keys - rotary, "v_head_dim": values}
    config |= {"head_dim": rotary, "num_key_value_heads": config["num_attention_heads"]}
    config.setdefault("q_lora_rank", None)


def _add_gemma4(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set in `config` the sizes of Gemma 4's layers, which differ, and the RoPE of both kinds of layers."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    inner, heads = (value(reader, f"{{arch}}.{key}") for key in ("feed_forward_length", "attention.head_count_kv"))
    full = value(reader, "{arch}.attention.sliding_window_pattern").index(False)  # a layer with full attention
    factors = tensors["rope_freqs.weight"].data.reshape(-1)
    bases = [_short(value(reader, f"{{arch}}.rope.freq_base{kind}", 10000.0)) for kind in ("", "_swa")]
    part = float((factors == 1).sum() / len(factors))
    config |= {
        "enable_moe_block": "num_experts" in config,
        "head_dim": int(value(reader, "{arch}.attention.key_length_swa")),
        "global_head_dim": int(value(reader, "{arch}.attention.key_length")),
        "num_global_key_value_heads": int(heads[full]) if isinstance(heads, Sequence) else None,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "use_double_wide_mlp": isinstance(inner, Sequence) and inner[-1] != inner[0],
        "num_kv_shared_layers": int(value(reader, "{arch}.attention.shared_kv_layers", 0)),
        "hidden_size_per_layer_input": int(value(reader, "{arch}.embedding_length_per_layer_input", 0)),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": bases[0]},
            "sliding_attention": {"rope_type": "default", "rope_theta": bases[1]},
        },
    }


def model_config(reader: GGUFReader) -> dict[str, Plain]:
    """Return the model's config.json. Raise UnsupportedGgufError for an architecture that cannot be converted."""
    (model_type, title), tensors = _kind(reader), {tensor.name for tensor in reader.tensors}
    config: dict[str, Plain] = {"architectures": [f"{title}ForCausalLM"], "model_type": model_type}
    _add_sizes(reader, config)
    biased = ("q", "output") if model_type in ("glm4", "glm4_moe", "seed_oss") else ("output",)
    config |= {
        "vocab_size": int(value(reader, "{arch}.vocab_size") or len(value(reader, "tokenizer.ggml.tokens"))),
        "rms_norm_eps": _short(value(reader, "{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(value(reader, "{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": any(each.endswith(f".attn_{name}.bias") for name in biased for each in tensors),
        "attention_dropout": 0.0,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        **({"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors} if model_type == "glm4_moe" else {}),
        "initializer_range": 0.02,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": value(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if model_type == "nemotron_h":
        config["layer_norm_epsilon"] = config["rms_norm_eps"]
    if model_type.startswith("lfm2"):
        config |= {"norm_eps": config["rms_norm_eps"], "block_auto_adjust_ff_dim": False}
    for source, name in NUMBERS.items():
        if (number := value(reader, f"{{arch}}.{source}")) is not None:
            config[name] = _short(number)
    if not model_type.startswith("gemma"):
        config["hidden_act"] = "silu"
    elif model_type != "gemma4_text":
        is_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[model_type]
        whole = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = whole if is_27b else config["head_dim"]
    window = value(reader, "{arch}.attention.sliding_window")
    if window is not None or model_type in ("phi3", "exaone4", "mixtral", "mistral"):
        config["sliding_window"] = window or None
        pattern = value(reader, "{arch}.attention.sliding_window_pattern")
        if isinstance(pattern, Sequence):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if model_type == "gemma4_text":
        for name in ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"):
            config.pop(name, None)
    else:
        _add_rope_scaling(reader, config)
    if model_type == "olmo3":  # only layers without windows have scaled RoPE
        theta, scaling = {"rope_theta": config.pop("rope_theta")}, config.pop("rope_scaling")
        plain = {"rope_type": "default", **theta}
        config["rope_parameters"] = {"full_attention": {**(scaling or plain), **theta}, "sliding_attention": plain}
    return config


def _add_router(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set in `config` how routers with sigmoids choose and weigh experts."""
    sigmoid = gguf.ExpertGatingFuncType.SIGMOID
    is_new = (
        config["model_type"] != "deepseek_v3" or config["num_hidden_layers"] == 47
    )  # GLM-4.7-Flash, as in llama.cpp
    if value(reader, "{arch}.expert_gating_func", sigmoid if is_new else None) != sigmoid:
        raise UnsupportedGgufError("the GGUF file's routers compute no sigmoids, as in DeepSeek-V2, which is not read")
    config["norm_topk_prob"] = bool(value(reader, "{arch}.expert_weights_norm", False))
    for name in ("n_group", "topk_group", "routed_scaling_factor"):
        config.setdefault(name, 1)


def _add_recurrence(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set in `config` the sizes and layers of gated delta nets or Mamba-2."""
    config["linear_value_head_dim"] = int(value(reader, "{arch}.ssm.inner_size")) // config["linear_num_value_heads"]
    recurrent = value(reader, "{arch}.attention.recurrent_layers")
    if isinstance(recurrent, Sequence):
        kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]


def _add_rope_scaling(reader: GGUFReader, config: dict[str, Plain]) -> None:
    """Set rope_scaling in `config`. The factors of the types llama3 and longrope are tensors of the file."""
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    original = value(reader, "{arch}.rope.scaling.original_context_length")
    factor = value(reader, "{arch}.rope.scaling.factor", value(reader, "{arch}.rope.scale_linear"))
    kind = value(reader, "{arch}.rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    if "rope_freqs.weight" in tensors:
        factors = tensors["rope_freqs.weight"].data.reshape(-1).astype(np.float64)
        config["rope_scaling"] = _llama3_scaling(factors, config["rope_theta"])
    elif "rope_factors_long.weight" in tensors:
        factors = {
            f"{which}_factor": [_short(number) for number in tensors[f"rope_factors_{which}.weight"].data.reshape(-1)]
            for which in ("long", "short")
        }
        config["rope_scaling"] = {"type": "longrope", **factors}
        if (attention_factor := value(reader, "{arch}.rope.scaling.attn_factor")) is not None:
            config["rope_scaling"]["attention_factor"] = _short(attention_factor)
        config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
    elif kind in ("linear", "yarn"):
        scaling: dict[str, Plain] = {"rope_type": kind, "factor": _short(factor)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])
            for name in ("beta_fast", "beta_slow"):
                if (number := value(reader, f"{{arch}}.rope.scaling.yarn_{name}")) is not None:
                    scaling[name] = _short(number)
        if multiplier := value(reader, "{arch}.rope.scaling.yarn_log_multiplier"):
            is_ministral = config["model_type"] == "ministral3"
            mscale = _short(multiplier) if is_ministral else round(multiplier * 10, 6)
            scaling |= {"mscale": 1.0 if is_ministral else mscale, "mscale_all_dim": mscale}
        if (beta := value(reader, "{arch}.attention.temperature_scale")) is not None:
            scaling["llama_4_scaling_beta"] = _short(beta)
        if config["model_type"] == "gpt_oss":  # llama.cpp rounds its bounds, too
            scaling["truncate"] = False
        config["rope_scaling"] = scaling
    elif kind != "none":
        raise UnsupportedGgufError(f"the GGUF file scales RoPE by {kind!r}, which is not read; linear and yarn are")


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Plain]:
    """Return rope_scaling of type llama3 from `factors`, which divide RoPE's frequencies, and RoPE's base `theta`.

    With low_freq_factor 1 and high_freq_factor 4, as in all Llama 3, a frequency of wavelength w is divided by 1 if w <
    original / 4, by `factor` if w > original, and else by 1 / ((1 - s) / factor + s) with s = (original / w - 1) / 3,
    where original is original_max_position_embeddings."""
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    between = (factors > 1 + 1e-6) & (factors < factor - 1e-6)
    if not between.any():
        raise UnsupportedGgufError("the GGUF file's rope_freqs do not determine the scaling of RoPE")
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    originals = wavelengths[between] * (3 * smooth + 1)
    if originals.max() - originals.min() > 1e-3 * originals.max():
        raise UnsupportedGgufError("the GGUF file's rope_freqs are not Llama 3's scaling, the only one that is read")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": round(float(originals.mean())),
    }  # fmt: skip


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection [heads * head_dim, inputs], or of its bias, from a RoPE that pairs
    adjacent rows to one that pairs the halves of a head: rows 2i and 2i + 1 become i and head_dim / 2 + i."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|call|>", "<end_of_turn>")


def _end_token_ids(reader: GGUFReader) -> list[int]:
    """Return the end tokens that the file names, and those of `_TURN_ENDS` in its chat template: files of Phi 3 do not
    name theirs, and llama.cpp knows these tokens by their texts. In gpt-oss <|end|> ends a message, but no turn."""
    named = [value(reader, f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    tokens, template = value(reader, "tokenizer.ggml.tokens"), str(value(reader, "tokenizer.chat_template"))
    turns = [text for text in _TURN_ENDS if text in template and (text != "<|end|>" or "<|return|>" not in template)]
    turns = [tokens.index(text) for text in turns if text in tokens]
    return list(dict.fromkeys(end for end in (*named, *turns) if end is not None))


def _write_description(reader: GGUFReader, folder: Path) -> dict[str, Plain]:
    """Write config.json, generation_config.json and the tokenizer, and return config.json's content."""
    config = model_config(reader)
    write_tokenizer(reader, folder)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if known := _end_token_ids(reader):
        ends["eos_token_id"] = known[0] if len(known) == 1 else known
    for name, data in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return config


def link_folder(gguf_file: Path, link: Path, table_file: Path) -> None:
    """Make a model folder for a GGUF file without copying the weights: the configuration, the tokenizer, a symbolic
    link to the file, and a table of where each tensor is in it. `link` and `table_file` are in one empty folder."""
    reader = GGUFReader(gguf_file)
    _write_description(reader, link.parent)
    table = {}
    for tensor in reader.tensors:
        begin, shape = int(tensor.data_offset), [int(n) for n in reversed(tensor.shape)]
        table[tensor.name] = [tensor.tensor_type.name, shape, begin, begin + int(tensor.n_bytes)]
    table_file.write_text(json.dumps(table))
    link.symlink_to(gguf_file.resolve())


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of a Llama matrix in GGUF -> its name in a Hugging Face folder."""


def write_folder(gguf_file: Path, folder: Path) -> None:
    """Convert a GGUF file of a Llama model to a Hugging Face folder, weights included, in float32, because bfloat16
    cannot represent all values of four-bit blocks."""
    reader = GGUFReader(gguf_file)
    config = _write_description(reader, folder)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, np.ndarray] = {}
    with work("converting", sum(int(tensor.n_elements) for tensor in reader.tensors), always=True) as advance:
        for tensor in reader.tensors:
            *layer, part, _ = tensor.name.split(".")  # output.weight, blk.3.attn_q.weight
            array = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            array = array.reshape([int(n) for n in reversed(tensor.shape)])
            if part in heads:
                array = unpermute(array, heads[part])
            prefix = f"model.layers.{layer[1]}." if layer else ""
            weights[f"{prefix}{_HF_NAMES[part]}.weight"] = np.ascontiguousarray(array)
            advance(array.size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
