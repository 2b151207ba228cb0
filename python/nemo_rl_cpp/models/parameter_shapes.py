"""Names and shapes of the tensors in a checkpoint, from a model's configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_rl_cpp.files.yaml_text import Plain


def parameter_shapes(native: Mapping[str, Plain]) -> dict[str, list[int]]:
    """Return {name: shape} of every parameter of the native `DecoderModel` with the arguments `native` (see
    `native_config`)."""
    hidden, inner, heads = native["hidden_size"], native["intermediate_size"], native["head_dim"]
    query, key_value = native["num_heads"] * heads, native["num_kv_heads"] * heads
    products = {
        "self_attn.q": (2 * query if native["output_gate"] else query, hidden), "self_attn.k": (key_value, hidden), "self_attn.v": (key_value, hidden), "self_attn.o": (hidden, query),
        "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner),
    }  # fmt: skip
    if native["fused_tensors"]:
        products = {
            "self_attn.qkv": (query + 2 * key_value, hidden), "self_attn.o": (hidden, query),
            "mlp.gate_up": (2 * inner, hidden), "mlp.down": (hidden, inner),
        }  # fmt: skip
    if "latent" in native:
        products = _latent_products(native) | {name: products[name] for name in ("mlp.gate", "mlp.up", "mlp.down")}
    if native["activation"] == "relu_squared":
        del products["mlp.gate"]
    normed_heads = {"none": {}, "head": {"q": heads, "k": heads}, "whole": {"q": query, "k": key_value}}
    biased = dict.fromkeys(("self_attn.q", "self_attn.k", "self_attn.v"), "qkv_bias") | {"self_attn.o": "output_bias"}
    ranks = native.get("latent", {})
    latents = {"q": ranks.get("query_rank"), "kv": ranks.get("rank")}
    with_experts = native.get("experts", {}).get("layers", ())
    recurrent, one_block = native.get("recurrent", {}).get("layers", ()), native.get("one_block")
    shapes = {"model.embed_tokens.weight": [native["vocab_size"], hidden]}
    for layer in range(len(native["layers"])):
        prefix = f"model.layers.{layer}."
        has_mixer, has_mlp = (True, True) if one_block is None else (one_block[layer], not one_block[layer])
        shapes |= {
            f"{prefix}{norm}.weight": [hidden]
            for place, norm in native["norms"].items()
            if (has_mlp if place.endswith("mlp") else has_mixer)
        }
        if layer in recurrent:
            shapes |= {prefix + name: shape for name, shape in _recurrent_shapes(native["recurrent"], hidden).items()}
        elif has_mixer:
            shapes |= {
                f"{prefix}self_attn.{norm}_norm.weight": [size]
                for norm, size in normed_heads[native["qk_norm"]].items()
            }
            shapes |= {f"{prefix}self_attn.{norm}_a_layernorm.weight": [size] for norm, size in latents.items() if size}
            if native["attention_sinks"]:
                shapes[f"{prefix}self_attn.sinks"] = [native["num_heads"]]
        if layer in with_experts:
            up = ["up"] if native["activation"] == "relu_squared" else ["gate", "up"]
            shapes |= {prefix + name: shape for name, shape in _expert_shapes(native["experts"], hidden, up).items()}
        for name, (rows, columns) in products.items():
            is_mlp = name.startswith("mlp.")
            if layer in (with_experts if is_mlp else recurrent) or not (has_mlp if is_mlp else has_mixer):
                continue
            suffix = "_proj_with_mqa" if name == "self_attn.kv_a" else "_proj"
            shapes[f"{prefix}{name}{suffix}.weight"] = [rows, columns]
            if native[biased.get(name, "mlp_bias")]:
                shapes[f"{prefix}{name}_proj.bias"] = [rows]
    shapes["model.norm.weight"] = [hidden]
    if native["value_head"]:
        shapes["score.weight"] = [1, hidden]
    elif not native["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [native["vocab_size"], hidden]
    return shapes


def _latent_products(native: Mapping[str, Plain]) -> dict[str, tuple[int, int]]:
    """Return {name: (rows, columns)} of the matrices of latent attention in one layer."""
    hidden, heads, size, latent = native["hidden_size"], native["num_heads"], native["head_dim"], native["latent"]
    rank, rotated, values = latent["rank"], latent["rope_dim"], heads * latent["value_dim"]
    queries = {"self_attn.q": (heads * size, hidden)}
    if query_rank := latent["query_rank"]:
        queries = {"self_attn.q_a": (query_rank, hidden), "self_attn.q_b": (heads * size, query_rank)}
    return queries | {
        "self_attn.kv_a": (rank + rotated, hidden), "self_attn.kv_b": (heads * (size - rotated) + values, rank),
        "self_attn.o": (hidden, values),
    }  # fmt: skip


def _recurrent_shapes(sizes: Mapping[str, Plain], hidden: int) -> dict[str, list[int]]:
    """Return {name without the layer's prefix: shape} of the parameters of a gated delta net or of Mamba-2."""
    heads, values = sizes["value_heads"], sizes["value_heads"] * sizes["value_dim"]
    mixed = 2 * sizes["key_heads"] * sizes["key_dim"] + values
    if "step_limits" in sizes:
        shapes = {
            "in_proj.weight": [values + mixed + heads, hidden], "conv1d.weight": [mixed, 1, sizes["conv_width"]], "conv1d.bias": [mixed],
            "A_log": [heads], "dt_bias": [heads], "D": [heads], "norm.weight": [values], "out_proj.weight": [hidden, values],
        }  # fmt: skip
        return {f"mamba.{name}": shape for name, shape in shapes.items()}
    shapes = {
        "in_proj_qkv.weight": [mixed, hidden], "in_proj_z.weight": [values, hidden], "in_proj_b.weight": [heads, hidden],
        "in_proj_a.weight": [heads, hidden], "conv1d.weight": [mixed, 1, sizes["conv_width"]], "A_log": [heads], "dt_bias": [heads],
        "norm.weight": [sizes["value_dim"]], "out_proj.weight": [hidden, values],
    }  # fmt: skip
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _expert_shapes(experts: Mapping[str, Plain], hidden: int, up: Sequence[str]) -> dict[str, list[int]]:
    """Return {name without the layer's prefix: shape} of the parameters of a mixture of experts; `up` lists which of
    the matrices gate and up an expert has."""
    block, inner, shared = experts["block"], experts["intermediate_size"], experts["shared_size"]
    width = experts["latent_size"] or hidden
    router = f"{block}.{experts['router']}"
    shapes = {f"{router}.weight": [experts["count"], hidden]}
    for expert in range(experts["count"]):
        prefix = f"{block}.experts.{expert}."
        shapes |= {f"{prefix}{experts[name]}.weight": [inner, width] for name in up}
        shapes[f"{prefix}{experts['down']}.weight"] = [width, inner]
    if experts["latent_size"]:
        shapes[f"{block}.fc1_latent_proj.weight"] = [width, hidden]
        shapes[f"{block}.fc2_latent_proj.weight"] = [hidden, width]
    if "sigmoid" in experts:
        shapes[f"{router}.e_score_correction_bias"] = [experts["count"]]
    if experts["has_biases"]:
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    if shared:
        name = f"{block}.{experts['shared']}"
        if experts["shared_gate"]:
            shapes[f"{name}_gate.weight"] = [1, hidden]
        shapes |= {f"{name}.{matrix}_proj.weight": [shared, hidden] for matrix in up}
        shapes[f"{name}.down_proj.weight"] = [hidden, shared]
    return shapes
