"""Writes a module as a Hugging Face folder that transformers loads by its own class."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from nemo_rl_cpp.models.hf.library import quietly, transformers
from nemo_rl_cpp.models.hf.value_net import SCORE, ValueNet
from nemo_rl_cpp.models.weight_files import INDEX_FILE, SINGLE_FILE

_SHARD = "5GB"


def save_module(module: nn.Module, folder: Path) -> None:
    """Weights in the module's precision under the names of the architecture's checkpoints, and config.json.

    A critic is saved as transformers' `...ForSequenceClassification` with one label where the architecture has that class, as the
    native critic is: its layers under the prefix that language models of the architecture use, and `score.weight`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / SINGLE_FILE, folder / INDEX_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        old.unlink(missing_ok=True)
    with quietly():
        backbone = module.backbone if isinstance(module, ValueNet) else module
        backbone.save_pretrained(folder, max_shard_size=_SHARD)
    (folder / "generation_config.json").unlink(
        missing_ok=True
    )  # the caller writes the one with the ends that were used
    if isinstance(module, ValueNet):
        _add_score(module, folder)


def _add_score(module: ValueNet, folder: Path) -> None:
    """Puts the head and the prefix into the files, one file at a time."""
    from safetensors.torch import load_file, save_file

    prefix = module.backbone.base_model_prefix
    files = sorted(folder.glob("model*.safetensors"))
    weight_map = {}
    for file in files:
        tensors = {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in load_file(file).items()}
        if file == files[-1]:
            tensors[SCORE] = module.score.weight.detach().cpu().clone()
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
