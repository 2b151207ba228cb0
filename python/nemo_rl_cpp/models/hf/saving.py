"""Writes a module as a Hugging Face folder that transformers loads by its own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nemo_rl_cpp.models.hf.library import quietly, transformers
from nemo_rl_cpp.models.hf.value_net import SCORE, ValueNet
from nemo_rl_cpp.models.weight_files import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    import torch

_SHARD = "5GB"


def save_module(module: nn.Module, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """Weights in the module's precision under the names of the architecture's checkpoints, and config.json.

    A critic is saved as transformers' `...ForSequenceClassification` with one label where the architecture has that class, as the
    native critic is: its layers under the prefix that language models of the architecture use, and `score.weight`.

    Args:
        whole: the weights, by the module's names, where its parameters are shared out among ranks.
    """
    score = module.score.weight if isinstance(module, ValueNet) and whole is None else (whole or {}).get(SCORE)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / SINGLE_FILE, folder / INDEX_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        old.unlink(missing_ok=True)
    with quietly():
        backbone = module.backbone if isinstance(module, ValueNet) else module
        tensors = None if whole is None else _named_as(backbone, whole, "backbone." if backbone is not module else "")
        backbone.save_pretrained(folder, max_shard_size=_SHARD, state_dict=tensors)
    if tensors is not None:
        _say_dtype(folder, next(iter(whole.values())).dtype)
    (folder / "generation_config.json").unlink(
        missing_ok=True
    )  # the caller writes the one with the ends that were used
    if isinstance(module, ValueNet):
        _add_score(module, folder, score)


def names_in_checkpoints(module: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """By which names `save_module` writes these tensors of the module."""
    from transformers.core_model_loading import revert_weight_conversion

    return set(revert_weight_conversion(module, dict(tensors)))


def _named_as(module: nn.Module, whole: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What `module.state_dict()` would give if its parameters were whole: these, and its buffers."""
    named = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return named | {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def _say_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Of the tensors: transformers writes that of the module's parameters, which ranks keep in float32."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_score(module: ValueNet, folder: Path, score: Tensor) -> None:
    """Puts the head and the prefix into the files, one file at a time."""
    from safetensors.torch import load_file, save_file

    prefix = module.backbone.base_model_prefix
    files = sorted(folder.glob("model*.safetensors"))
    weight_map = {}
    for file in files:
        tensors = {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in load_file(file).items()}
        if file == files[-1]:
            tensors[SCORE] = score.detach().cpu().clone()
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = folder / INDEX_FILE
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        index.write_text(json.dumps({**content, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    known = transformers().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    made = known[type(module.config)].__name__ if type(module.config) in known else type(module.backbone).__name__
    one_label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    path.write_text(
        json.dumps({**config, "architectures": [made], **one_label}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
