"""Names and shapes of the tensors in a checkpoint, from a model's configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.gemma4 import own_sizes

Shapes = dict[str, list[int]]
"""Name of a parameter -> its shape. The functions for a part of a layer return names without the layer's prefix."""


def parameter_shapes(native: Mapping[str, Plain]) -> Shapes:
    """Return {name: shape} of every parameter of the model with the arguments `native` (see `native_config`)."""
    hidden = native["hidden_size"]
    shapes = {"model.embed_tokens.weight": [native["vocab_size"], hidden], **per_layer_shapes(native)}
    for layer, part in enumerate(layer_shapes(native)):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    shapes["model.norm.weight"] = [hidden]
    if native["value_head"]:
        shapes["score.weight"] = [1, hidden]
    elif not native["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [native["vocab_size"], hidden]
    return shapes


def per_layer_shapes(native: Mapping[str, Plain]) -> Shapes:
    """Return the shapes of the tensors from which Gemma 4 computes the inputs of all layers."""
    inputs, hidden = native.get("per_layer_input", 0), native["hidden_size"]
    if not inputs:
        return {}
    columns = len(native["layers"]) * inputs
    return {
        "model.embed_tokens_per_layer.weight": [native["vocab_size"], columns],
        "model.per_layer_model_projection.weight": [columns, hidden],
        "model.per_layer_projection_norm.weight": [inputs],
    }


def layer_shapes(native: Mapping[str, Plain]) -> Iterator[Shapes]:
    hidden, one_block = native["hidden_size"], native.get("one_block")
    if "layer_sizes" in native:
        yield from map(partial(_gemma4_shapes, native), range(len(native["layers"])))
        return
    attention, mlp, recurrent, experts = _attention_shapes(native), _mlp_shapes(native), {}, {}
    if "recurrent" in native:
        recurrent = dict.fromkeys(native["recurrent"]["layers"], _recurrent_shapes(native["recurrent"], hidden))
    if "experts" in native:
        experts = dict.fromkeys(native["experts"]["layers"], _expert_shapes(native))
    for layer in range(len(native["layers"])):
        has_mixer, has_mlp = (True, True) if one_block is None else (one_block[layer], not one_block[layer])
        norms = {
            f"{norm}.weight": [hidden]
            for place, norm in native["norms"].items()
            if (has_mlp if place.endswith("mlp") else has_mixer)
        }
        mixer = recurrent.get(layer, attention if has_mixer else {})
        yield norms | mixer | experts.get(layer, mlp if has_mlp else {})


def _gemma4_shapes(native: Mapping[str, Plain], layer: int) -> Shapes:
    own, hidden, inputs = own_sizes(native, layer), native["hidden_size"], native["per_layer_input"]
    attention = _attention_shapes(own)
    unused = {"v_proj"} if own["values_are_keys"] else set()
    unused |= {"k_proj", "v_proj", "k_norm"} if own["keys_of"] >= 0 else set()
    shapes = {f"{name}.weight": [hidden] for name in native["norms"].values()}
    shapes |= {name: shape for name, shape in attention.items() if name.split(".")[1] not in unused}
    shapes |= (_expert_shapes(own) if "experts" in native else _mlp_shapes(own)) | {"layer_scalar": [1]}
    if inputs:
        shapes |= {"per_layer_input_gate.weight": [inputs, hidden], "per_layer_projection.weight": [hidden, inputs]}
    return shapes


def _attention_shapes(native: Mapping[str, Plain]) -> Shapes:
    hidden, heads, size = native["hidden_size"], native["num_heads"], native["head_dim"]
    query, key_value = heads * size, native["num_kv_heads"] * size
    norms = {"none": {}, "head": {"q_norm": size, "k_norm": size}, "whole": {"q_norm": query, "k_norm": key_value}}
    vectors = norms[native["qk_norm"]]
    matrices = {
        "q_proj": (2 * query if native["output_gate"] else query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
    }  # fmt: skip
    if native["fused_qkv"]:
        matrices = {"qkv_proj": (query + 2 * key_value, hidden), "o_proj": (hidden, query)}
    if latent := native.get("latent"):
        rank, query_rank, rotated, values = (latent[key] for key in ("rank", "query_rank", "rope_dim", "value_dim"))
        vectors = {"kv_a_layernorm": rank}
        matrices = {
            "q_proj": (query, hidden), "kv_a_proj_with_mqa": (rank + rotated, hidden),
            "kv_b_proj": (heads * (size - rotated + values), rank), "o_proj": (hidden, heads * values),
        }  # fmt: skip
        if query_rank:
            vectors["q_a_layernorm"] = query_rank
            matrices |= {"q_a_proj": (query_rank, hidden), "q_b_proj": (query, query_rank)}
            del matrices["q_proj"]
    shapes = {f"{name}.weight": [length] for name, length in vectors.items()}
    shapes |= {f"{name}.weight": list(shape) for name, shape in matrices.items()}
    for key, names in (("qkv_bias", ("q_proj", "k_proj", "v_proj")), ("output_bias", ("o_proj",))):
        shapes |= {f"{name}.bias": [matrices[name][0]] for name in names if native[key]}
    if native["attention_sinks"]:
        shapes["sinks"] = [heads]
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _up_matrices(native: Mapping[str, Plain]) -> list[str]:
    """Return the names of the MLP's matrices that multiply its input: "gate" and "up", or "up" for the ungated
    activation relu_squared."""
    return ["up"] if native["activation"] == "relu_squared" else ["gate", "up"]


def _mlp_shapes(native: Mapping[str, Plain]) -> Shapes:
    hidden, inner = native["hidden_size"], native["intermediate_size"]
    matrices = {name: [inner, hidden] for name in _up_matrices(native)}
    if native["fused_gate_up"]:
        matrices = {"gate_up": [2 * inner, hidden]}
    matrices["down"] = [hidden, inner]
    shapes = {f"mlp.{name}_proj.weight": shape for name, shape in matrices.items()}
    return shapes | {f"mlp.{name}_proj.bias": shape[:1] for name, shape in matrices.items() if native["mlp_bias"]}


def _recurrent_shapes(sizes: Mapping[str, Plain], hidden: int) -> Shapes:
    heads, values = sizes["value_heads"], sizes["value_heads"] * sizes["value_dim"]
    mixed = 2 * sizes["key_heads"] * sizes["key_dim"] + values
    if "gated_conv" in sizes:
        shapes = {
            "in_proj": [3 * values, hidden],
            "conv": [values, 1, sizes["conv_width"]],
            "out_proj": [hidden, values],
        }
        return {f"conv.{name}.weight": shape for name, shape in shapes.items()}
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


_NORMS_BESIDE_MLP = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


def _expert_shapes(native: Mapping[str, Plain]) -> Shapes:
    experts, hidden, up = native["experts"], native["hidden_size"], _up_matrices(native)
    inner, shared = experts["intermediate_size"], experts["shared_size"]
    block = f"{experts['block']}." if experts["block"] else ""
    width = experts["latent_size"] or hidden
    router = f"{block}{experts['router']}"
    shapes = {f"{router}.weight": [experts["count"], hidden]}
    for expert in range(experts["count"]):
        prefix = f"{block}experts.{expert}."
        shapes |= {f"{prefix}{experts[name]}.weight": [inner, width] for name in up}
        shapes[f"{prefix}{experts['down']}.weight"] = [width, inner]
    if experts["latent_size"]:
        shapes[f"{block}fc1_latent_proj.weight"] = [width, hidden]
        shapes[f"{block}fc2_latent_proj.weight"] = [hidden, width]
    if "sigmoid" in experts:
        shapes[f"{router}.e_score_correction_bias"] = [experts["count"]]
    if experts["has_biases"]:
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    if shared:
        name = f"{block}{experts['shared']}"
        if experts["shared_gate"]:
            shapes[f"{name}_gate.weight"] = [1, hidden]
        shapes |= {f"{name}.{matrix}_proj.weight": [shared, hidden] for matrix in up}
        shapes[f"{name}.down_proj.weight"] = [hidden, shared]
    if experts["beside_mlp"]:
        shapes |= {"router.scale": [hidden], "router.per_expert_scale": [experts["count"]]}
        shapes |= {f"{name}.weight": [hidden] for name in _NORMS_BESIDE_MLP}
    return shapes
