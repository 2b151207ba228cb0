"""`lora_cfg`: which matrices of a model get low-rank adapters, by the names of Hugging Face's modules."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from .base import Positive, Section, key
from .known_models import ModelSizes

MATRICES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "qkv_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "gate_up_proj": "mlp",
    "down_proj": "mlp",
}
"""The matrices of a layer, each with the module that holds it."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Those of Phi 3, and what they stand for."""
_SIDE_BY_SIDE = (
    ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("o_proj",), ("gate_proj", "up_proj"), ("gate_up_proj",), ("down_proj",),
)  # fmt: skip
"""What a layer stores as one matrix (csrc/model/parameters.cpp)."""
FROZEN = ("lm_head", "model.embed_tokens", "score")
"""Matrices outside of layers, which have no adapters."""


class LoraConfig(Section):
    """LoRA of the DTensor backend: A [dim, in] and B [out, dim] of some matrices are trained, and all weights stay as they are."""

    is_switched = True
    enabled: bool = key(
        False,
        "train low-rank adapters instead of the weights, in a few bytes a parameter instead of 18 to 22; read with dtensor_cfg.enabled "
        "(docs/lora.md)",
    )
    target_modules: list[str] = key(
        [],
        "matrices to adapt: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (of Phi 3 qkv_proj and gate_up_proj), or "
        "names with wildcards such as *.layers.0.*.q_proj; []: all but exclude_modules. Only with match_all_linear false",
    )
    exclude_modules: list[str] = key(
        [], "matrices to leave out, named likewise; instead of target_modules, and only with match_all_linear false"
    )
    match_all_linear: bool = key(True, "adapt every matrix of every layer; head and embedding stay frozen")
    dim: Positive = key(8, "the adapters' rank")
    alpha: Positive = key(32, "an adapter is multiplied by alpha / dim")
    lora_A_init: Literal["xavier", "kaiming", "uniform"] = key(
        "xavier",
        "how A is drawn from the run's seed: xavier (normal) or kaiming (uniform; NeMo RL's uniform is the same). B begins at 0",
    )


def matches(pattern: str, module: str) -> bool:
    """Whether a name of `target_modules` means a module such as model.layers.0.self_attn.q_proj: it is the name, its end behind a
    dot, or the whole of it with * for any text."""
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None


def module_of(layer: int, name: str) -> str:
    """The whole name of one of MATRICES."""
    return f"model.layers.{layer}.{MATRICES[name]}.{name}"


def modules_of_layers(layers: int, fused: bool = False) -> Iterator[str]:
    """Every module that may have an adapter, in the order of a model's parameters; `fused`: of a model with fused tensors."""
    without = [name for parts in _FUSED.values() for name in parts] if fused else _FUSED
    for layer in range(layers):
        yield from (module_of(layer, name) for name in MATRICES if name not in without)


def adapted_modules(lora: LoraConfig, layers: int, fused: bool = False) -> list[str]:
    """The modules of a model with so many layers that get adapters."""
    modules = list(modules_of_layers(layers, fused))
    everything, wanted, unwanted = lora.match_all_linear, lora.target_modules, lora.exclude_modules
    if everything or not (wanted or unwanted):
        return modules
    if wanted:
        return [module for module in modules if any(matches(pattern, module) for pattern in wanted)]
    return [module for module in modules if not any(matches(pattern, module) for pattern in unwanted)]


def nothing_adapted(lora: LoraConfig, model_name: str, layers: int) -> str:
    """The key that leaves no matrix of a model to adapt, and what is wrong with it."""
    if lora.target_modules:
        why = f"target_modules is {lora.target_modules}, which no matrix of {model_name} with its {layers} layers is called"
    else:
        why = f"exclude_modules is {lora.exclude_modules}, which are all matrices of {model_name} with its {layers} layers"
    return f"{why}: name some of {', '.join(MATRICES)}"


class AdapterSizes(NamedTuple):
    """Numbers of elements: of A and B together, and of the stored matrices that are kept a second time, without adapters."""

    trained: int
    kept: int


def adapter_sizes(lora: LoraConfig, sizes: ModelSizes) -> AdapterSizes:
    """Of a model with these sizes."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, key_value = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    shapes = {
        "q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden), "o_proj": (hidden, query),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    shapes |= {name: (sum(shapes[part][0] for part in parts), hidden) for name, parts in _FUSED.items()}
    elements = {name: rows * columns for name, (rows, columns) in shapes.items()}
    modules = set(adapted_modules(lora, sizes.num_hidden_layers, sizes.fused_tensors))
    trained = sum(lora.dim * sum(shapes[module.rpartition(".")[2]]) for module in modules)
    kept = sum(
        sum(elements[name] for name in group)
        for layer in range(sizes.num_hidden_layers)
        for group in _SIDE_BY_SIDE
        if any(module_of(layer, name) in modules for name in group)
    )
    return AdapterSizes(trained, kept)
