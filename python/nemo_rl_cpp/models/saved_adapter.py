"""Reads the folder of an adapter in PEFT's format, whose base weights are not saved with it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_cpp.models.weight_files import INDEX_FILE, SINGLE_FILE, RawTensor, raw_tensors, tensor_entries

ADAPTER = "adapter"
"""The adapter's subfolder in the folder of the weights."""
CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "base.json"
"""The first two are PEFT's files; the last identifies the base weights of the adapter."""
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter of a quantised base model.

    Attributes:
        folder: the folder with PEFT's two files.
        dim, alpha, use_rslora: as in `lora_cfg`.
        targets: names of the adapted weights.
        base: `model_name` of the run that saved it.
        seed: seed of the base weights, if they are random.
        quantization: format of the base model's matrices.
    """

    folder: Path
    dim: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...]
    base: str
    seed: int
    quantization: str

    def tensors(self) -> Iterator[tuple[str, RawTensor]]:
        """Yield (name, tensor) for A [dim, in] and B [out, dim] of every target."""
        for name, tensor in raw_tensors([self.folder / WEIGHTS_FILE]):
            yield name.removeprefix(PREFIX), tensor


def saved_adapter(weights: Path) -> SavedAdapter | None:
    """Return the adapter in the folder `weights` if it has a quantised base model and the folder holds no other
    weights; otherwise return None."""
    folder = weights / ADAPTER
    if not (folder / BASE_FILE).is_file() or (weights / SINGLE_FILE).is_file() or (weights / INDEX_FILE).is_file():
        return None
    peft, base = (json.loads((folder / name).read_text()) for name in (CONFIG_FILE, BASE_FILE))
    if "quantization" not in base:
        return None
    names = (name.removeprefix(PREFIX) for name in tensor_entries(folder / WEIGHTS_FILE))
    targets = tuple(f"{name.removesuffix(LORA_A)}.weight" for name in names if name.endswith(LORA_A))
    return SavedAdapter(
        folder, peft["r"], float(peft["lora_alpha"]), peft.get("use_rslora", False), targets,
        base["model_name"], base["seed"], base["quantization"],
    )  # fmt: skip
