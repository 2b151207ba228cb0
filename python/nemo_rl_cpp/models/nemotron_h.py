"""The peculiarities of Nemotron-H in config.json and in checkpoints: a pattern of layers, each with one block (a mixer,
an MLP or a mixture of experts), and the names of the tensors. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.architectures import FULL, MLP, PATTERN, RECURRENT
from nemo_rl_cpp.models.config_checks import expect

_LETTERS = {"mamba": "M", RECURRENT: "M", "attention": "*", FULL: "*", MLP: "-", "moe": "E"}
"""Names of the kinds in `layers_block_type` -> their letters in `hybrid_override_pattern`."""


def pattern_of(form: Mapping[str, Plain]) -> str:
    """Return the kinds of the layers of the config.json `form`, one letter per layer. As in transformers, a list of
    kinds takes precedence over a pattern."""
    listed = form.get("layers_block_type") or form.get("layer_types")
    pattern = form.get("hybrid_override_pattern")
    if listed is not None:
        pattern = "".join(_LETTERS.get(str(kind), "?") for kind in listed) if isinstance(listed, list) else None
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(PATTERN):
        raise ModelFolderError(
            f"layers_block_type or hybrid_override_pattern is {listed or pattern!r}, but a kind for each layer was expected: "
            "mamba (M), attention (*), mlp (-) or moe (E)"
        )
    if not {"M", "*"} <= set(pattern):
        raise ModelFolderError(
            f"hybrid_override_pattern is {pattern}, but layers with Mamba (M) and with attention (*) were expected"
        )
    return pattern


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json `form` with the kinds of its layers only in `hybrid_override_pattern`, and with
    `num_hidden_layers`, `rms_norm_eps` and `time_step_limit` set, also if it has them under other names."""
    kept = {key: value for key, value in form.items() if key not in ("layers_block_type", "layer_types")}
    pattern = pattern_of(form)
    return kept | {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "rms_norm_eps": form["layer_norm_epsilon"],
        "time_step_limit": list(step_limits(form)),
    }


def step_limits(form: Mapping[str, Plain]) -> tuple[float, float]:
    """Return Mamba's minimum and maximum time step. transformers 5 writes infinity as {"__float__": "Infinity"}."""
    limits, least, greatest = form["time_step_limit"], 1.0, 0.0
    if isinstance(limits, (list, tuple)) and len(limits) == 2:
        with suppress(TypeError, ValueError):
            least, greatest = (float(each.get("__float__") if isinstance(each, dict) else each) for each in limits)
    expect(0 <= least <= greatest, "time_step_limit", limits, "a pair of numbers from 0 in ascending order")
    return least, greatest


_OURS = (
    (r"^backbone\.embeddings\.", "model.embed_tokens."),
    (r"^backbone\.norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
    (r"\.mixer\.(?=(qkv|[qkvo])_proj\.)", ".self_attn."),
    (r"\.mixer\.(?=(up_proj|down_proj|gate|experts|shared_experts|fc[12]_latent_proj)\.)", ".mlp."),
    (r"\.mixer\.", ".mamba."),
)
_THEIRS = (
    (r"^model\.embed_tokens\.", "backbone.embeddings."),
    (r"^model\.norm\.", "backbone.norm_f."),
    (r"^model\.", "backbone."),
)


def _replaced(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for pattern, text in pairs:
        name = re.sub(pattern, text, name)
    return name


def our_name(name: str) -> str:
    """Return the native core's name of a tensor that a checkpoint names `name`."""
    return _replaced(name, _OURS)


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint of the parameter that the native core names `name`."""
    return _replaced(module_name(name), _THEIRS)


def module_name(name: str) -> str:
    """Return transformers' name, which PEFT uses, of a layer's parameter that the native core names `name`."""
    return re.sub(r"\.(self_attn|mlp|mamba)\.", ".mixer.", name)
