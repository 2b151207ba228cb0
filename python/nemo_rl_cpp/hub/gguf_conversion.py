"""Converts a GGUF file of a Llama-like model to a Hugging Face folder. (transformers' converter takes 4 s to import and
would add a dependency to the extra `smollm2`.)

GGUF stores quantised weights in blocks. It orders the rows of query and key projections for a RoPE that pairs adjacent
rows of a head, but Hugging Face's Llama pairs the two halves of a head. This module undoes both.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf import GGUFReader
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.stages import work

CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
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


def open_gguf(path: Path) -> GGUFReader:
    return gguf.GGUFReader(str(path))


def _value(reader: GGUFReader, key: str, default: Plain = None) -> Plain:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _short(value: float) -> float:
    """Return the decimal number that was meant: GGUF stores float32, so 1e-5 is read as 9.99999974e-06."""
    return float(str(np.float32(value)))


def model_config(reader: GGUFReader) -> dict[str, Plain]:
    """Return the model's config.json. Raise ValueError for an architecture other than Llama."""
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model; only 'llama' is converted")
    config: dict[str, Plain] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for source, name in CONFIG_KEYS.items():
        config[name] = int(_value(reader, f"llama.{source}"))
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return config | {
        "vocab_size": int(_value(reader, "llama.vocab_size") or len(_value(reader, "tokenizer.ggml.tokens"))),
        "rms_norm_eps": _short(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(_value(reader, "llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        "use_cache": True,
    }


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection [heads * head_dim, D], or of its bias, from a RoPE of adjacent
    pairs to one of two halves: in each head, row 2i becomes row i, and row 2i + 1 becomes head_dim / 2 + i."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor. Raise ValueError for a tensor that a Llama model does not have."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    raise ValueError(f"the GGUF file holds a tensor {name!r} that a Llama model does not have")


def write_weights(reader: GGUFReader, config: dict[str, Plain], file: Path) -> None:
    """Write model.safetensors, in float32, because bfloat16 cannot represent all values of four-bit blocks."""
    weights: dict[str, np.ndarray] = {}
    with work("converting", sum(int(tensor.n_elements) for tensor in reader.tensors), always=True) as advance:
        for tensor in reader.tensors:
            array = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            array = array.reshape([int(n) for n in reversed(tensor.shape)])
            if tensor.name.endswith("attn_q.weight"):
                array = unpermute(array, config["num_attention_heads"])
            elif tensor.name.endswith("attn_k.weight"):
                array = unpermute(array, config["num_key_value_heads"])
            weights[hf_name(tensor.name)] = np.ascontiguousarray(array)
            advance(array.size)
    save_file(weights, str(file), metadata={"format": "pt"})


def _tokenizer(reader: GGUFReader) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return the byte-level BPE tokenizer and the texts of its control tokens. Raise ValueError for any other
    tokenizer."""
    kind, pre = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ValueError(
            f"the GGUF file's tokenizer is {kind!r} with pre-tokenizer {pre!r}; only 'gpt2' with 'smollm' is converted"
        )
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False, byte_fallback=False
        )
    )
    # each digit is a separate token, so that the model does not learn "42" as one symbol
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [tokens[i] for i, flag in enumerate(_value(reader, "tokenizer.ggml.token_type")) if flag == 3]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer, control


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json into the
    folder."""
    backend, control = _tokenizer(reader)
    tokens = _value(reader, "tokenizer.ggml.tokens")

    def named(role: str) -> str | None:
        index = _value(reader, f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[int(index)]

    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {role: named(name) for role, name in roles.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(_value(reader, "llama.context_length")),
        **texts,
        "additional_special_tokens": control,
    }
    template = _value(reader, "tokenizer.chat_template")
    settings |= {} if template is None else {"chat_template": template}
    backend.save(str(folder / "tokenizer.json"))
    special = {role: text for role, text in texts.items() if text is not None} | {"additional_special_tokens": control}
    for name, data in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(gguf_file: Path, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder. `folder` must exist and be empty."""
    reader = open_gguf(gguf_file)
    config = model_config(reader)
    write_tokenizer(reader, folder)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, data in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    write_weights(reader, config, folder / "model.safetensors")
