"""The peculiarities of Granite 4 in config.json and in checkpoints: layers with Mamba-2 or attention, and the names of
the MLP's matrices. Needs no torch.

A checkpoint holds the matrices of a layer's MLP under other names, gate and up as one matrix:

    shared_mlp.input_linear [2I, D], gate's rows before up's    -> mlp.gate_proj, mlp.up_proj
    shared_mlp.output_linear [D, I]                             -> mlp.down_proj
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.config_checks import expect
from nemo_rl_cpp.models.nemotron_h import step_limits

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl_cpp.models.weight_files import RawTensor, TensorEntry

MODEL_TYPE = "granitemoehybrid"
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers 5's names of the kinds of layers -> those in released checkpoints, which older versions also read."""
_OURS = ((".shared_mlp.input_linear", ".mlp.gate_up_proj"), (".shared_mlp.output_linear", ".mlp.down_proj"))


def canonical(form: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the config.json `form` with the kind of each layer, and the size of Mamba's heads, set. Raise
    ModelFolderError for a list of layers with other kinds, or sizes that do not fit together."""
    kinds = form.get("layer_types") or form.get("layers_block_type") or ["mamba"] * form["num_hidden_layers"]
    is_list = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    found = [_KINDS.get(kind, kind) for kind in kinds] if is_list else []
    fits = len(found) == form["num_hidden_layers"] and set(found) <= set(_KINDS.values())
    expect(
        fits,
        "layer_types",
        kinds,
        f"a list of num_hidden_layers {form['num_hidden_layers']} entries, mamba or attention,",
    )
    expect("attention" in found, "layer_types", kinds, "at least one layer with attention")
    heads, size, inner = form["mamba_n_heads"], form["mamba_d_head"], form["mamba_expand"] * form["hidden_size"]
    size = inner // heads if size == "auto" else size
    expect(heads * size == inner, "mamba_d_head", size, "mamba_expand * hidden_size / mamba_n_heads")
    kept = {key: value for key, value in form.items() if key != "layers_block_type"}
    return kept | {"layer_types": found, "mamba_d_head": size, "time_step_limit": list(step_limits(form))}


def split_mlps(tensors: Iterable[tuple[str, RawTensor | TensorEntry]]) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the tensors of a checkpoint with the matrices of MLPs as the native core has them. Entries of a file's
    header (`TensorEntry`) are split in the same way, without data."""
    for given, tensor in tensors:
        name = our_name(given)
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


def joined_mlps(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as in a checkpoint: the inverse of `split_mlps`."""
    import torch

    for name, tensor in tensors.items():
        if name.endswith(".mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            yield checkpoint_name(name.replace("gate_proj", "gate_up_proj")), torch.cat([tensor, up])
        elif not name.endswith(".mlp.up_proj.weight"):
            yield checkpoint_name(name), tensor


def our_name(name: str) -> str:
    """Return the native core's name of a tensor or module that a checkpoint or PEFT names `name`."""
    for theirs, ours in _OURS:
        name = re.sub(rf"{re.escape(theirs)}(?=\.|$)", ours, name)
    return name


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint, and in PEFT, of the tensor or module that the native core names `name`."""
    for theirs, ours in _OURS:
        name = re.sub(rf"{re.escape(ours)}(?=\.|$)", theirs, name)
    return name
