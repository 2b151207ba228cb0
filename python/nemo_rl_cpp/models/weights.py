"""Moves weights between a native model and a Hugging Face folder (safetensors, one file or sharded)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 1000**3


def named_views(layout: list[tuple[str, list[int], int]], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter of `layout` (name, shape, offset) as a view of the flat buffer, under its Hugging Face name."""
    return {name: flat[offset : offset + math.prod(shape)].view(shape) for name, shape, offset in layout}


def load_weights(model: Any, folder: str | Path) -> None:
    """Fills a native `DecoderModel` from the folder's safetensors files.

    A causal checkpoint may be read into a value model: its head is left out and the scalar head starts at zero (so that
    the first values are 0). Weights in another dtype are converted.

    Raises:
        ValueError: no weights, or a tensor that is missing, unexpected or of the wrong shape; all are named.
    """
    folder = Path(folder)
    files = _weight_files(folder)
    target = named_views(model.layout, model.compute if model.masters is None else model.masters)
    missing, wrong, extra = set(target), [], []
    for name, tensor in _tensors(files):
        name = _known_name(name, target)
        if name in target:
            if list(tensor.shape) != list(target[name].shape):
                wrong.append(f"{name} is {list(tensor.shape)}, expected {list(target[name].shape)}")
            else:
                target[name].copy_(tensor)
            missing.discard(name)
        elif not _is_harmless(name, target):
            extra.append(name)
    if "score.weight" in missing:
        target["score.weight"].zero_()
        missing.discard("score.weight")
    if missing or wrong or extra:
        parts = [("missing", sorted(missing)), ("of the wrong shape", wrong), ("unexpected", sorted(extra))]
        listed = "; ".join(f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" for what, names in parts if names)
        raise ValueError(f"the weights in {folder} do not fit its config.json: {listed}")
    model.masters_changed()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [n for n in names if not (folder / n).exists()]
        if absent:
            raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
        return [folder / n for n in names]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise ValueError(f"{folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE} (other formats are not read)")


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                yield name, handle.get_tensor(name)


def _known_name(name: str, target: dict[str, torch.Tensor]) -> str:
    """Base-model checkpoints lack the `model.` prefix."""
    return f"model.{name}" if name not in target and f"model.{name}" in target else name


def _is_harmless(name: str, target: dict[str, torch.Tensor]) -> bool:
    tied_or_value_head = name == "lm_head.weight" and "lm_head.weight" not in target
    return tied_or_value_head or name.endswith("rotary_emb.inv_freq")


def save_weights(model: Any, folder: str | Path, config: dict[str, Any], max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Writes config.json and the compute weights (float32 or bfloat16) as transformers would, sharded when large."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = named_views(model.layout, model.compute)
    dtype = str(model.compute.dtype).removeprefix("torch.")
    saved = {**config, "dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous().clone()  # a file of its own storage, not of the flat buffer's
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in shard}
    total = sum(t.nbytes for t in tensors.values())
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def initialize_weights(model: Any, seed: int, std: float = 0.02) -> None:
    """A fresh random model: normal matrices, unit norms, zero biases; the same weights for the same seed.

    An untied language-model head starts at a tenth of the others' spread, so that the first policy is nearly uniform:
    reinforcement learning from scratch needs to explore.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = model.compute if model.masters is None else model.masters
    for name, view in named_views(model.layout, flat).items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        elif name.endswith(".bias") or name == "score.weight":
            view.zero_()
        else:
            spread = 0.1 * std if name == "lm_head.weight" else std
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float32) * spread)
    model.masters_changed()
