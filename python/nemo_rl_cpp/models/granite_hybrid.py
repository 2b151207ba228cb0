"""The peculiarities of Granite 4, and of Granite 3 with experts, in config.json and in checkpoints: layers with Mamba-2
or attention, and the names of the matrices of MLPs and experts. Needs no torch.

A checkpoint holds the matrices of a layer's MLP, or with E experts of its shared expert, under other names, and gate
and up as one matrix, whose rows are first gate's, then up's:

    shared_mlp.input_linear [2I, D]             -> mlp.gate_proj, mlp.up_proj, or those of mlp.shared_experts
    shared_mlp.output_linear [D, I]             -> mlp.down_proj, or that of mlp.shared_experts
    block_sparse_moe.input_linear [E, 2I, D]    -> mlp.experts.E.gate_proj, mlp.experts.E.up_proj
    block_sparse_moe.output_linear [E, D, I]    -> mlp.experts.E.down_proj
    block_sparse_moe.router.layer [E, D]        -> mlp.router
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.config_checks import expect
from nemo_rl_cpp.models.nemotron_h import step_limits

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl_cpp.models.weight_files import RawTensor, TensorEntry

MODEL_TYPES = (HYBRID := "granitemoehybrid", "granitemoe")
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers 5's names of the kinds of layers -> those in released checkpoints, which older versions also read."""
_FIRST = "model.layers.0.mlp"
_MATRICES = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json `form` with the kind of each layer, and the size of Mamba's heads, set. Raise
    ModelFolderError for a list of layers with other kinds, or sizes that do not fit together."""
    kinds = form.get("layer_types") or form.get("layers_block_type") or ["mamba"] * form["num_hidden_layers"]
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    found = [_KINDS.get(kind, kind) for kind in kinds] if is_list else []
    fits = len(found) == form["num_hidden_layers"] and set(found) <= set(_KINDS.values())
    every = f"a list of num_hidden_layers {form['num_hidden_layers']} entries, mamba or attention,"
    expect(fits, "layer_types", kinds, every)
    expect("attention" in found, "layer_types", kinds, "at least one layer with attention")
    heads, size, inner = form["mamba_n_heads"], form["mamba_d_head"], form["mamba_expand"] * form["hidden_size"]
    size = inner // heads if size == "auto" else size
    expect(heads * size == inner, "mamba_d_head", size, "mamba_expand * hidden_size / mamba_n_heads")
    kept = {key: value for key, value in form.items() if key != "layers_block_type"}
    return kept | {"layer_types": found, "mamba_d_head": size, "time_step_limit": list(step_limits(form))}


def split_mlps(
    tensors: Iterable[tuple[str, RawTensor | TensorEntry]], shapes: Container[str]
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the tensors of a checkpoint with the matrices of MLPs as the native core has them, and those of all experts
    as `weight_files.split_experts` reads them. `shapes` has the names of the native core's parameters. Entries of a
    file's header (`TensorEntry`) are split in the same way, without data."""
    has_experts = f"{_FIRST}.shared_experts.down_proj.weight" in shapes
    for given, tensor in tensors:
        name = re.sub(r"block_sparse_moe\.router\.(layer\.)?", "mlp.router.", our_name(given, has_experts))
        if found := re.fullmatch(r"(.*)block_sparse_moe\.(input|output)_linear\.weight", name):
            name = f"{found[1]}mlp.experts.{_MATRICES[found[2] + '_linear']}"
        if not name.endswith(".gate_up_proj.weight") or name == given or tensor.shape[0] % 2:
            yield name, tensor
            continue
        half = tensor._replace(shape=[tensor.shape[0] // 2, *tensor.shape[1:]])
        data = getattr(tensor, "data", None)
        for i, part in enumerate(("gate_proj", "up_proj")):
            if data is None:
                yield name.replace("gate_up_proj", part), half
                continue
            size = len(data) // 2
            with data[i * size : (i + 1) * size] as rows:
                yield name.replace("gate_up_proj", part), half._replace(data=rows)


def joined_mlps(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as in a checkpoint: the inverse of `split_mlps`. In `tensors` a matrix gate_proj stands
    before its up_proj."""
    import torch

    gates: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(".gate_proj.weight"):
            gates[name] = tensor
        elif name.endswith(".up_proj.weight"):
            gate = gates.pop(name.replace("up_proj", "gate_proj"))
            yield checkpoint_name(name.replace("up_proj", "gate_up_proj")), torch.cat([gate, tensor])
        elif found := re.fullmatch(r"(.*)\bmlp\.experts\.(gate_up|down)_proj", name):
            side = "output" if found[2] == "down" else "input"
            yield f"{found[1]}block_sparse_moe.{side}_linear.weight", tensor
        else:
            yield checkpoint_name(name.replace(".mlp.router.", ".block_sparse_moe.router.layer.")), tensor


def our_name(name: str, has_experts: bool) -> str:
    """Return the native core's name of a tensor or module of an MLP that a checkpoint or PEFT names `name`;
    gate_up_proj are gate_proj and up_proj. Other names are returned unchanged."""
    name = re.sub(r"\bblock_sparse_moe\.experts(?!\.\d)", "mlp.experts", name)  # Mixtral's experts have numbers
    block = "mlp.shared_experts" if has_experts else "mlp"
    return re.sub(r"\bshared_mlp\.(\w+)", lambda found: f"{block}.{_MATRICES.get(found[1], found[1])}", name)


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint, and in PEFT, of the tensor or module that the native core names `name`."""
    name = name.replace(".mlp.experts", ".block_sparse_moe.experts")
    for theirs, ours in _MATRICES.items():
        name = re.sub(rf"\.mlp\.(shared_experts\.)?{ours}\b", f".shared_mlp.{theirs}", name)
    return name
