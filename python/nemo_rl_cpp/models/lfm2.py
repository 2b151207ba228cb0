"""The peculiarities of LFM2 in config.json and in checkpoints: layers with gated short convolutions or attention, the
size of MLPs, and the names of tensors. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.architectures import FULL
from nemo_rl_cpp.models.config_checks import expect, is_number, is_size

MODEL_TYPES = ("lfm2", "lfm2_moe")
_OTHER_KEYS = ("full_attn_idxs", "tie_embedding", "block_ff_dim")
"""Keys that transformers reads as layer_types, tie_word_embeddings and intermediate_size."""


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json `form` with the kind of each layer, and the size of MLPs as the weights have it. Raise
    ModelFolderError for a list of layers with other kinds, or an invalid size."""
    kept = {key: value for key, value in form.items() if key not in _OTHER_KEYS}
    width = form.get("block_ff_dim", form["intermediate_size"])
    if form.get("block_auto_adjust_ff_dim"):
        width = _adjusted(width, form["block_ffn_dim_multiplier"], form["block_multiple_of"])
        kept["block_auto_adjust_ff_dim"] = False
    if form["model_type"] == "lfm2":  # mlx-lm reads this key alone
        kept["block_ff_dim"] = width
    return kept | {
        "intermediate_size": width,
        "layer_types": _kinds(form),
        "rms_norm_eps": form["norm_eps"],
        "tie_word_embeddings": form.get("tie_embedding", form["tie_word_embeddings"]),
    }


def _adjusted(width: Plain, factor: Plain, multiple: Plain) -> int:
    """Return two thirds of `width`, times `factor`, rounded up to a multiple, as transformers computes it."""
    expect(is_size(width), "intermediate_size", width, "a whole number above 0")
    expect(factor is None or is_number(factor), "block_ffn_dim_multiplier", factor, "a number above 0")
    expect(is_size(multiple), "block_multiple_of", multiple, "a whole number above 0")
    thirds = int(2 * width / 3)
    return thirds if factor is None else -(-int(factor * thirds) // multiple) * multiple


def _kinds(form: Mapping[str, Plain]) -> list[str]:
    layers, kinds, indices = form["num_hidden_layers"], form.get("layer_types"), form.get("full_attn_idxs")
    if kinds is None and isinstance(indices, list):
        kinds = [FULL if layer in indices else "conv" for layer in range(layers)]
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, "conv") for kind in kinds)
    both = f"a list of num_hidden_layers {layers} entries, conv or {FULL}, with both of them,"
    expect(fits and len(set(kinds)) == 2, "layer_types", kinds, both)
    return kinds


_NAMES = (
    ("model.embedding_norm.", "model.norm."),
    (".self_attn.q_layernorm", ".self_attn.q_norm"),
    (".self_attn.k_layernorm", ".self_attn.k_norm"),
    (".self_attn.out_proj", ".self_attn.o_proj"),
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
)
"""Parts of names in a checkpoint -> the native core's."""
_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def our_name(name: str) -> str:
    """Return the native core's name of a tensor that a checkpoint or PEFT names `name`. Names that LFM2 does not have
    are returned unchanged."""
    matrix = r"(\.feed_forward\.(?:experts\.\d+\.)?)(w[123])\b"
    name = re.sub(matrix, lambda found: found[1] + _MATRICES[found[2]], name)
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    return name


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint, and in PEFT, of the tensor that the native core names `name`."""
    for theirs, ours in _NAMES:
        name = name.replace(ours, theirs)
    for theirs, ours in _MATRICES.items():
        name = re.sub(rf"(\.feed_forward\.(?:experts\.\d+\.)?){ours}\b", rf"\1{theirs}", name)
    return name
