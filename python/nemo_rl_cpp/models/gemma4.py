"""The peculiarities of Gemma 4's text models in config.json: layers with full attention have heads of another size, the
last layers read the keys and values of earlier ones, and per-layer inputs. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.architectures import AROUND, FULL, SLIDING
from nemo_rl_cpp.models.config_checks import expect, is_size, is_whole

_OWN = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Keys of transformers 5's per_layer_config -> those of released models, which every version reads."""
LARGEST_HEAD = 512
UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144}
"""The defaults of Gemma 4 12B (`gemma4_unified`) that differ from those of the other models."""


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json `form` with a list of layer types, the last of which is full attention, and with the sizes
    of the layers with full attention in `global_head_dim` and `num_global_key_value_heads`. Raise ModelFolderError if
    per_layer_config gives other layers sizes, or these layers several."""
    layers = form["num_hidden_layers"]
    kinds = form.get("layer_types") or [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(layers)]
    fits = isinstance(kinds, list) and len(kinds) == layers and set(kinds) <= {FULL, SLIDING}
    expect(fits, "layer_types", kinds, f"a list of num_hidden_layers {layers} entries, {FULL} or {SLIDING},")
    kinds = [*kinds[:-1], FULL]
    form = {**form, "layer_types": kinds}
    if form["vocab_size_per_layer_input"] is None:
        form["vocab_size_per_layer_input"] = form["vocab_size"]
    own = form.pop("per_layer_config", None)
    if not own:
        return form
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL}
    same = isinstance(own, Mapping) and own.keys() == full and all(sizes == own[min(full)] for sizes in own.values())
    known = same and isinstance(sizes := own[min(full)], Mapping) and sizes.keys() <= _OWN.keys()
    expect(known, "per_layer_config", own, f"one head_dim and num_key_value_heads for the layers {sorted(full)}")
    return form | {_OWN[key]: value for key, value in sizes.items()}


def check(form: Mapping[str, Plain]) -> None:
    """Raise ModelFolderError for invalid sizes in the canonical config.json `form`."""
    if form["use_bidirectional_attention"] == "all":
        raise ModelFolderError(
            "use_bidirectional_attention is 'all', which is not supported: causal attention was expected"
        )
    size, heads = form["global_head_dim"], _global_heads(form)
    expect(
        is_size(size) and size % 8 == 0 and size <= LARGEST_HEAD,
        "global_head_dim",
        size,
        f"a multiple of 8 up to {LARGEST_HEAD}",
    )
    fits = is_size(heads) and form["num_attention_heads"] % heads == 0
    expect(fits, "num_global_key_value_heads", heads, "a divisor of num_attention_heads")
    inputs, shared, layers = (
        form["hidden_size_per_layer_input"],
        form["num_kv_shared_layers"],
        form["num_hidden_layers"],
    )
    expect(inputs is None or is_whole(inputs, 0), "hidden_size_per_layer_input", inputs, "a whole number from 0")
    rows = form["vocab_size_per_layer_input"]
    expect(
        not inputs or rows == form["vocab_size"], "vocab_size_per_layer_input", rows, f"vocab_size {form['vocab_size']}"
    )
    if form["enable_moe_block"] and form["use_double_wide_mlp"] and shared:
        raise ModelFolderError("use_double_wide_mlp is true, which is not supported in a model with experts")
    kinds = form["layer_types"]
    fits = is_whole(shared, 0) and shared < layers and set(kinds[layers - shared :]) <= set(kinds[: layers - shared])
    expect(fits, "num_kv_shared_layers", shared, "a number of layers that leaves one of each kind before them")


def _global_heads(form: Mapping[str, Plain]) -> Plain:
    """Return the number of key/value heads of layers with full attention."""
    own = form["num_global_key_value_heads"] if form["attention_k_eq_v"] else None
    return form["num_key_value_heads"] if own is None else own


def native(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the arguments of the native `DecoderModel` that are particular to Gemma 4."""
    inputs = form["hidden_size_per_layer_input"] or 0
    norms = {"norms": AROUND | {"after_per_layer": "post_per_layer_input_norm"}} if inputs else {}
    return {"layer_sizes": layer_sizes(form), "per_layer_input": inputs, **norms}


def layer_sizes(form: Mapping[str, Plain]) -> list[tuple[int, int, int, bool, int]]:
    """Return for each layer (head size, key/value heads, intermediate size, whether values are the keys before their
    norm, the layer whose keys and values it reads or -1)."""
    kinds, first = form["layer_types"], form["num_hidden_layers"] - form["num_kv_shared_layers"]
    sizes = []
    for layer, kind in enumerate(kinds):
        is_full, reads_others = kind == FULL, layer >= first
        head_dim, heads = form["head_dim"], form["num_key_value_heads"]
        if is_full:
            head_dim, heads = form["global_head_dim"], _global_heads(form)
        inner = form["intermediate_size"] * (2 if reads_others and form["use_double_wide_mlp"] else 1)
        source = max(other for other in range(first) if kinds[other] == kind) if reads_others else -1
        sizes.append((head_dim, heads, inner, is_full and bool(form["attention_k_eq_v"]), source))
    return sizes


def own_sizes(native: Mapping[str, Plain], layer: int) -> Mapping[str, Plain]:
    """Return the native model's arguments with the sizes of `layer` as those of all layers, and its `values_are_keys`
    and `keys_of`."""
    if "layer_sizes" not in native:
        return native
    names = ("head_dim", "num_kv_heads", "intermediate_size", "values_are_keys", "keys_of")
    return {**native, **dict(zip(names, native["layer_sizes"][layer], strict=True))}
