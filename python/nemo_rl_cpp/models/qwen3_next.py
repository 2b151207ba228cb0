"""The fused projections of Qwen3-Next's gated delta nets in checkpoints and in PEFT's adapters.

A checkpoint holds two matrices with the rows of one key head after the other. The native core has four, which
checkpoints of Qwen3.5 hold, too:

    in_proj_qkvz    of each key head q, k, and the v and z of its value heads -> in_proj_qkv (all q, k, v), in_proj_z
    in_proj_ba      of each key head the b and a of its value heads           -> in_proj_b, in_proj_a
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.hf_config import read_config

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from nemo_rl_cpp.models.weight_files import RawTensor, TensorEntry

PARTS = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
"""Fused matrix -> the matrices of the native core."""
WHOLE = {part: fused for fused, parts in PARTS.items() for part in parts}
_NAME = re.compile(r"(.*\.linear_attn\.)(in_proj_\w+)(\.weight|\.lora_[AB]\.weight)")


def _projection(tensor: str, among: Mapping[str, object]) -> tuple[str, str, str] | None:
    """Return the three parts of a tensor's name, such as ("model.layers.0.linear_attn.", "in_proj_qkvz", ".weight"), if
    the second, the matrix, is a key of `among`; otherwise None."""
    found = _NAME.fullmatch(tensor)
    return found.groups() if found is not None and found[2] in among else None


def is_fused(config: Mapping[str, Plain]) -> bool:
    """Return whether checkpoints of the model with this config.json hold fused projections."""
    return config["model_type"] == "qwen3_next"


def fused_module(module: str) -> str:
    """Return the name in checkpoints of the matrix that holds the rows of `module`, a matrix of the native core."""
    path, _, name = module.rpartition(".")
    return f"{path}.{WHOLE.get(name, name)}"


def module_parts(module: str) -> list[str]:
    """Return the names of the native core's matrices whose rows `module`, a matrix of a checkpoint, holds."""
    path, _, name = module.rpartition(".")
    return [f"{path}.{part}" for part in PARTS.get(name, (name,))]


def part_rows(config: Mapping[str, Plain]) -> dict[str, dict[str, np.ndarray]]:
    """Return {fused matrix: {matrix of the native core: indices of its rows in the fused matrix}}."""
    import numpy as np

    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    shared = config["linear_num_value_heads"] // keys
    values = shared * config["linear_value_head_dim"]

    def of(*counts: int) -> list[np.ndarray]:
        rows = np.arange(keys * sum(counts)).reshape(keys, -1)
        return [part.reshape(-1) for part in np.split(rows, np.cumsum(counts)[:-1], axis=1)]

    *qkv, z = of(size, size, values, values)
    ba = of(shared, shared)
    return {
        fused: dict(zip(parts, rows, strict=True))
        for (fused, parts), rows in zip(PARTS.items(), ([np.concatenate(qkv), z], ba), strict=True)
    }


def split_projections(
    tensors: Iterable[tuple[str, RawTensor | TensorEntry]], folder: Path
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the tensors of a checkpoint in `folder`, with each fused projection split into the native core's matrices.
    A projection with an unexpected number of rows is yielded unchanged."""
    places = None
    for name, tensor in tensors:
        found = _projection(name, PARTS)
        if found is None:
            yield name, tensor
            continue
        path, fused, _ = found
        import numpy as np  # takes time to load, and most models have no such tensor

        if places is None:
            config = read_config(folder)
            places = part_rows(config) if is_fused(config) else {}
        parts = places.get(fused, {})
        if tensor.shape[0] != sum(map(len, parts.values())):
            yield name, tensor
            continue
        for part, rows in parts.items():
            entry = tensor._replace(shape=[len(rows), *tensor.shape[1:]])
            if (data := getattr(tensor, "data", None)) is not None:
                taken = np.frombuffer(data, np.uint8).reshape(tensor.shape[0], -1)[rows]
                entry = entry._replace(data=memoryview(taken.reshape(-1)))
            yield f"{path}{part}.weight", entry


def joined_projections(tensors: Mapping[str, Tensor], config: Mapping[str, Plain]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as in a checkpoint: the inverse of `split_projections`."""
    import torch

    orders = {
        fused: torch.cat([torch.from_numpy(rows) for rows in parts.values()]).argsort()
        for fused, parts in part_rows(config).items()
    }
    for name, tensor in tensors.items():
        found = _projection(name, WHOLE)
        if found is None:
            yield name, tensor
            continue
        path, part, _ = found
        fused = WHOLE[part]
        if part == PARTS[fused][0]:
            parts = [tensors[f"{path}{each}.weight"] for each in PARTS[fused]]
            yield f"{path}{fused}.weight", torch.cat(parts)[orders[fused]]


# The adapters of a fused projection's two matrices, A_1, B_1 and A_2, B_2 of rank dim, are one adapter of rank 2 dim:
# its A has the rows of A_1 and then those of A_2, its B has B_1 in the first dim columns and B_2 in the others. A matrix
# without adapter has zeros there.


def joined_adapters(tensors: Mapping[str, Tensor], config: Mapping[str, Plain], dim: int) -> dict[str, Tensor]:
    """Return the tensors of an adapter in PEFT's format with one adapter for each fused projection. `dim`: the rank."""
    places, joined = part_rows(config), {}
    for name, tensor in tensors.items():
        if (found := _projection(name, WHOLE)) is None:
            joined[name] = tensor
            continue
        path, part, kind = found
        parts = places[WHOLE[part]]
        first = list(parts).index(part) * dim
        is_a = kind == ".lora_A.weight"
        shape = (2 * dim, tensor.shape[1]) if is_a else (sum(map(len, parts.values())), 2 * dim)
        whole = joined.setdefault(f"{path}{WHOLE[part]}{kind}", tensor.new_zeros(shape))
        if is_a:
            whole[first : first + dim] = tensor
        else:
            whole[parts[part], first : first + dim] = tensor
    return joined


def split_adapters(
    tensors: Mapping[str, Tensor | np.ndarray], config: Mapping[str, Plain], dim: int
) -> dict[str, Tensor | np.ndarray]:
    """Return the tensors of an adapter for the native core's matrices: the inverse of `joined_adapters`."""
    places, split = part_rows(config), {}
    for name, tensor in tensors.items():
        if (found := _projection(name, PARTS)) is None:
            split[name] = tensor
            continue
        path, fused, kind = found
        for index, (part, rows) in enumerate(places[fused].items()):
            mine = slice(index * dim, (index + 1) * dim)
            if tensors[f"{path}{fused}.lora_A.weight"][mine].any():  # otherwise the matrix has no adapter
                split[f"{path}{part}{kind}"] = tensor[mine] if kind == ".lora_A.weight" else tensor[rows][:, mine]
    return split
