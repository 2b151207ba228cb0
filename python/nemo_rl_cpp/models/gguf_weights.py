"""The tensors of a GGUF file: their names and their layout, compared with those of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.gguf_conversion import unpermute
from nemo_rl_cpp.hub.sources import GGUF_TABLE
from nemo_rl_cpp.models import hf_config
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes


class Family(NamedTuple):
    """The properties of a model_type in llama.cpp.

    Attributes:
        architecture: its name in the file.
        interleaved: llama.cpp's RoPE pairs adjacent rows of a head; Hugging Face's pairs the two halves.
        has_windows: llama.cpp supports sliding-window attention. If not, it attends to all tokens, so the file limits
            the context to the window.
        scalings: supported types of RoPE scaling."""

    architecture: str
    interleaved: bool = False
    has_windows: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")


FAMILIES = {
    "llama": Family("llama", interleaved=True, scalings=("linear", "yarn", "llama3")),
    "mistral": Family("llama", interleaved=True),
    "smollm3": Family("smollm3", interleaved=True),
    "granite": Family("granite", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "olmo2": Family("olmo2"),
    "phi3": Family("phi3", scalings=("longrope",)),
    "gemma2": Family("gemma2", has_windows=True, scalings=()),
    "gemma3_text": Family("gemma3", has_windows=True, scalings=("linear",)),
}


def tensor_names(config: Mapping[str, Plain]) -> dict[str, str]:
    """Return {name of a parameter in the model folder: its name in llama.cpp}."""
    architecture = FAMILIES[config["model_type"]].architecture
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    shapes = parameter_shapes(hf_config.native_config(config))
    return {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in shapes}


class LinkedTensors:
    """The tensors of a GGUF file that a folder made by `hub.sources.gguf_folder` links to.

    `places` maps a tensor's Hugging Face name to (dtype, shape, first byte, end). A dtype is that of safetensors, or
    the name of a block format of ggml, such as Q4_K."""

    def __init__(self, folder: Path) -> None:
        self._config = hf_config.read_config(folder)
        names = {there: here for here, there in tensor_names(self._config).items()}
        table = hf_config.read_json(folder / GGUF_TABLE)
        # RoPE factors are skipped, because config.json has them
        self.places = {names.get(name, name): place for name, place in table.items() if not name.startswith("rope_f")}

    def restored(self, name: str, data: memoryview) -> memoryview:
        """Return the bytes of a tensor in Hugging Face's layout. They are copied only if llama.cpp's layout differs."""
        dtype, shape = self.places[name][:2]
        if not (_paired_heads(self._config, name) or _is_offset(self._config, name)):
            return data
        values = np.frombuffer(data, np.float32 if dtype == "F32" else np.uint8).reshape(shape[0], -1)
        return memoryview(np.ascontiguousarray(from_gguf(self._config, name, values))).cast("B")


def to_gguf(config: Mapping[str, Plain], name: str, values: np.ndarray) -> np.ndarray:
    """Return a parameter in llama.cpp's layout. Gemma's norms get 1 added. If llama.cpp's RoPE pairs adjacent rows, the
    rows of query and key projections are interleaved: row i of a head's first half becomes row 2i, and row i of its
    second half becomes row 2i + 1."""
    heads = _paired_heads(config, name)
    if heads:
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values + np.float32(1) if _is_offset(config, name) else values


def from_gguf(config: Mapping[str, Plain], name: str, values: np.ndarray) -> np.ndarray:
    """Return a parameter in Hugging Face's layout: the inverse of `to_gguf`. `values` are numbers, or the bytes of each
    row's quantised blocks."""
    heads = _paired_heads(config, name)
    if heads:
        values = unpermute(values, heads)
    return values - np.float32(1) if _is_offset(config, name) else values


def _paired_heads(config: Mapping[str, Plain], name: str) -> int:
    """Return the number of heads of a query or key projection whose rows are interleaved; 0 for any other parameter."""
    if not FAMILIES[config["model_type"]].interleaved:
        return 0
    keys = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    return next((config[key] for part, key in keys.items() if part in name), 0)


def _is_offset(config: Mapping[str, Plain], name: str) -> bool:
    return SUPPORTED_ARCHITECTURES[config["model_type"]].norm_offset != 0 and name.endswith("norm.weight")
