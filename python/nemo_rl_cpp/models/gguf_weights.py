"""The names and layout of a GGUF file's tensors, compared with a Hugging Face folder's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.gguf_conversion import unpermute
from nemo_rl_cpp.hub.sources import GGUF_FILE, GGUF_TABLE
from nemo_rl_cpp.models import hf_config
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES, has_experts
from nemo_rl_cpp.models.nemotron_h import checkpoint_name
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from nemo_rl_cpp.models.qwen3_next import is_fused


class Family(NamedTuple):
    """The properties of a model_type in llama.cpp, by which its tensors are converted: llama.cpp's name `architecture`;
    whether its RoPE is `interleaved`, pairing adjacent rows of a head, not its halves; whether it `has_windows`
    (otherwise the file limits the context to the window); and the supported types of RoPE scaling."""

    architecture: str
    interleaved: bool = False
    has_windows: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")


KV = ".kv_b_proj.weight"
FAMILIES = {
    "llama": Family("llama", interleaved=True, scalings=("linear", "yarn", "llama3")),
    "mistral": Family("llama", interleaved=True),
    "ministral3": Family("mistral3", interleaved=True),
    "smollm3": Family("smollm3", interleaved=True),
    "granite": Family("granite", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo2", has_windows=True),
    "granitemoe": Family("granitemoe", interleaved=True),
    "granitemoehybrid": Family("granitehybrid", interleaved=True),
    "exaone4": Family("exaone4", scalings=("linear", "yarn", "llama3")),
    "glm4": Family("glm4"),
    "ernie4_5": Family("ernie4_5"),
    "seed_oss": Family("seed_oss"),
    "gpt_oss": Family("gpt-oss", has_windows=True, scalings=("yarn",)),
    "phi3": Family("phi3", scalings=("longrope",)),
    "gemma2": Family("gemma2", has_windows=True, scalings=()),
    "gemma3_text": Family("gemma3", has_windows=True, scalings=("linear",)),
    "gemma4_text": Family("gemma4", has_windows=True, scalings=("proportional",)),
    "qwen3_moe": Family("qwen3moe"),
    "qwen2_moe": Family("qwen2moe"),
    "olmoe": Family("olmoe"),
    "mixtral": Family("llama", interleaved=True),
    "glm4_moe": Family("glm4moe"),
    "deepseek_v3": Family("deepseek2"),
    "glm4_moe_lite": Family("deepseek2"),
    "nemotron_h": Family("nemotron_h"),
    "lfm2": Family("lfm2"),
    "lfm2_moe": Family("lfm2moe"),
    "qwen3_5_text": Family("qwen35"),
    "qwen3_5_moe_text": Family("qwen35moe"),
    "qwen3_next": Family("qwen3next"),
}


def family_of(config: Mapping[str, Plain]) -> Family:
    """Return the `Family` of the model with this config.json. Granite 4 without Mamba-2 is Granite in llama.cpp, and
    Nemotron-H with experts has another name."""
    kind = config["model_type"]
    if kind == "nemotron_h" and has_experts(config):
        return Family("nemotron_h_moe")
    is_granite = kind == "granitemoehybrid" and "mamba" not in config["layer_types"] and not has_experts(config)
    return FAMILIES["granite" if is_granite else kind]


def file_shapes(config: Mapping[str, Plain]) -> dict[str, list[int]]:
    """Return {name: shape} of the parameters of the model, with k_b_proj and v_b_proj in place of kv_b_proj."""
    shapes = {}
    for name, shape in parameter_shapes(hf_config.native_config(config)).items():
        if name.endswith(KV):
            heads, rank = config["num_attention_heads"], shape[1]
            shapes[name.replace("kv_b", "k_b")] = [heads, rank, config["qk_nope_head_dim"]]
            shapes[name.replace("kv_b", "v_b")] = [heads, config["v_head_dim"], rank]
        else:
            shapes[name] = shape
    return shapes


def file_names(name: str) -> list[str]:
    """Return the names in `file_shapes` of the parameter `name`."""
    return [name.replace("kv_b", "k_b"), name.replace("kv_b", "v_b")] if name.endswith(KV) else [name]


def split_latent(config: Mapping[str, Plain], name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return {name in `file_shapes`: values} of the parameter `name`. llama.cpp multiplies queries by k_b_proj, so that
    it holds each head's part transposed."""
    if not name.endswith(KV):
        return {name: values}
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return dict(zip(file_names(name), map(np.ascontiguousarray, (keys.swapaxes(1, 2), values)), strict=True))


_GEMMA4_NAMES = {
    "experts.gate_proj.weight": "ffn_gate_exps.weight",
    "experts.up_proj.weight": "ffn_up_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""Names in llama.cpp of tensors of Gemma 4's layers that the package gguf does not map."""


def tensor_names(config: Mapping[str, Plain]) -> dict[str, str]:
    """Return {name of a parameter in the model folder: name in llama.cpp}. A layer's experts share one name."""
    architecture = family_of(config).architecture
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    spelt = {name: re.sub(r"\.experts\.\d+", ".experts", name) for name in file_shapes(config)}
    others = {
        ".dt_bias": ".dt_proj.bias",
        ".layer_scalar": ".layer_scalar.weight",
        "correction_bias": "correction.bias",
        ".sinks": ".sinks.weight",
    }
    if architecture.startswith("lfm2"):
        others["model.norm."] = "model.embedding_norm."
    if architecture.startswith("nemotron_h"):
        theirs = re.compile(r"layers\.\d+\.norm\.|_latent_proj\.")
        spelt = {name: checkpoint_name(each) if theirs.search(each) else each for name, each in spelt.items()}
    if architecture == "qwen3next":
        others |= dict.fromkeys(("in_proj_b.", "in_proj_a."), "in_proj_ba.")
    for ours, theirs in others.items():
        spelt = {name: spelling.replace(ours, theirs) for name, spelling in spelt.items()}
    found = {name: known.get_name(spelling, try_suffixes=(".weight", ".bias")) for name, spelling in spelt.items()}
    if architecture == "gemma4":
        for name in (name for name, there in found.items() if there is None):
            layer, part = re.sub(r"experts\.\d+", "experts", name).removeprefix("model.layers.").split(".", 1)
            found[name] = f"blk.{layer}.{_GEMMA4_NAMES[part]}"
    return found


def stored_names(config: Mapping[str, Plain]) -> dict[str, list[str]]:
    """Return {name of a tensor in llama.cpp: the model folder's parameters that it contains, in their order}."""
    stored: dict[str, list[str]] = {}
    for here, there in tensor_names(config).items():
        stored.setdefault(there, []).append(here)
    return stored


def stored_shape(config: Mapping[str, Plain], name: str, shape: Sequence[int]) -> list[int]:
    """Return the shape in llama.cpp of the parameter `name` of shape `shape`: mostly without a dimension of size 1, but
    with dimensions of heads and groups in Mamba-2."""
    if name.endswith((".mamba.A_log", ".mamba.D")):
        return [*shape, 1]
    if name.endswith(".mamba.norm.weight"):
        groups = config[SUPPORTED_ARCHITECTURES[config["model_type"]].recurrent[0]]
        return [groups, shape[0] // groups]
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return [shape[0], shape[2]]
    return list(shape[1:] if name.endswith(".shared_expert_gate.weight") else shape)


class LinkedTensors:
    """The tensors of a GGUF file that a folder made by `hub.sources.gguf_folder` links to. `places` maps a tensor's
    Hugging Face name to (dtype of safetensors or block format of ggml, shape, first byte, end)."""

    def __init__(self, folder: Path) -> None:
        self._config = hf_config.read_config(folder)
        stored, shapes = stored_names(self._config), parameter_shapes(hf_config.native_config(self._config))
        self.places: dict[str, tuple[str, list[int], int, int]] = {}
        self._file, halves = folder / GGUF_FILE, {}
        self._dequantised: dict[str, str] = {}
        for there, (dtype, shape, begin, end) in hf_config.read_json(folder / GGUF_TABLE).items():
            # RoPE factors are in config.json, and layers behind the last one (multi-token prediction) are not computed
            behind = re.match(r"blk\.(\d+)\.", there)
            if there.startswith("rope_f") or (behind and int(behind[1]) >= self._config["num_hidden_layers"]):
                continue
            if (
                there not in stored
                and self._config.get("num_kv_shared_layers")
                and re.search(r"\.attn_[kv]\b|_k_norm", there)
            ):
                continue  # of layers that read the keys and values of earlier ones
            if (found := stored.get(there, [""])[0]).endswith((".k_b_proj.weight", ".v_b_proj.weight")):
                halves.setdefault(re.sub(r"\b[kv]_b_proj", "kv_b_proj", found), {})[found] = (dtype, shape, begin, end)
                continue
            names = [fused] if (fused := self._fused(there)) else stored.get(there, [there])
            if there.endswith(".ffn_gate_up_exps.weight"):  # of each expert the rows of gate, then those of up
                pairs = zip(*(stored[there.replace("gate_up", matrix)] for matrix in ("gate", "up")), strict=True)
                names, shape = [name for pair in pairs for name in pair], [2 * shape[0], shape[1] // 2, shape[2]]
            each, own = (end - begin) // len(names), shape if len(names) == 1 else shape[1:]
            for index, name in enumerate(names):
                known = shapes.get(name, own)
                is_own = stored_shape(self._config, name, known) == own
                kind = "F32" if _splits_blocks(self._config, name, dtype) else dtype
                if kind != dtype:
                    self._dequantised[name] = dtype
                self.places[name] = kind, known if is_own else own, begin + index * each, begin + (index + 1) * each

        self._halves = {name: parts for name, parts in halves.items() if len(parts) == 2}
        self.places |= {
            name: ("F32", shapes[name], *parts[file_names(name)[0]][2:]) for name, parts in self._halves.items()
        }

    def _fused(self, name: str) -> str | None:
        """Return the name in a checkpoint of a fused projection of Qwen3-Next (models/qwen3_next.py), or of kv_b_proj,
        which only older files hold."""
        fused = {"attn_kv_b": "self_attn.kv_b_proj"}
        if is_fused(self._config):
            fused = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
        found = re.fullmatch(rf"blk\.(\d+)\.({'|'.join(fused)})\.weight", name)
        return None if found is None else f"model.layers.{found[1]}.{fused[found[2]]}.weight"

    def _joined(self, name: str) -> memoryview:
        """Return the bytes of a kv_b_proj, which the file holds as two tensors: the inverse of `split_latent`."""
        file = np.memmap(self._file, np.uint8, "r")
        keys, values = (
            gguf.quants.dequantize(file[begin:end], gguf.GGMLQuantizationType[dtype]).astype(np.float32).reshape(shape)
            for dtype, shape, begin, end in (self._halves[name][part] for part in file_names(name))
        )
        return memoryview(np.concatenate([keys.swapaxes(1, 2), values], axis=1)).cast("B")

    def restored(self, name: str, data: memoryview) -> memoryview:
        """Return the bytes of the tensor `name` in Hugging Face's layout, given its bytes `data` in the GGUF file. They
        are copied only if llama.cpp's layout differs."""
        if name in self._halves:
            return self._joined(name)
        dtype, shape = self.places[name][:2]
        moved = _paired_heads(self._config, name) > 0 or _value_heads(self._config, name) is not None
        if not (moved or _is_offset(self._config, name) or name.endswith(".A_log")):
            return data
        if kind := self._dequantised.get(name):
            values = gguf.quants.dequantize(np.frombuffer(data, np.uint8), gguf.GGMLQuantizationType[kind])
        else:
            values = np.frombuffer(data, np.float32 if dtype == "F32" else np.uint8)
        values = values.reshape(shape[0], -1)
        return memoryview(np.ascontiguousarray(from_gguf(self._config, name, values))).cast("B")


def to_gguf(config: Mapping[str, Plain], name: str, values: np.ndarray) -> np.ndarray:
    """Return a parameter in llama.cpp's layout. The norms of Gemma and Qwen3.5 get 1 added; A_log becomes -exp(A_log).
    If llama.cpp's RoPE pairs adjacent rows, the rows of query and key projections are interleaved: row i of a head's
    first half becomes row 2i, and row i of its second half row 2i + 1. The value heads of a gated delta net that share
    a key head are adjacent in Hugging Face; llama.cpp has the first one of every key head, then the second ones."""
    heads = _paired_heads(config, name)
    if heads:
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    values = _with_swapped_value_heads(config, name, values, to_gguf=True)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if _is_offset(config, name):
        values = values + np.float32(1)
    return values.reshape(stored_shape(config, name, values.shape))


def from_gguf(config: Mapping[str, Plain], name: str, values: np.ndarray) -> np.ndarray:
    """Return a parameter in Hugging Face's layout: the inverse of `to_gguf`, except for dimensions of size 1. `values`
    are numbers, or the bytes of each row's quantised blocks."""
    heads = _paired_heads(config, name)
    if heads:
        values = unpermute(values, heads)
    values = _with_swapped_value_heads(config, name, values, to_gguf=False)
    if name.endswith(".A_log"):
        values = np.log(-values)
    return values - np.float32(1) if _is_offset(config, name) else values


def _value_heads(config: Mapping[str, Plain], name: str) -> tuple[int, int] | None:
    """Return where the value heads of a gated delta net lie in the parameter `name`: (axis, number of rows before
    them). Return None if the parameter has none, or llama.cpp stores them in the same order as Hugging Face."""
    if ".linear_attn." not in name or name.endswith(".norm.weight") or is_fused(config):
        return None
    keys = config["linear_num_key_heads"]
    if keys == config["linear_num_value_heads"]:
        return None
    behind_keys = name.endswith((".in_proj_qkv.weight", ".conv1d.weight"))
    return int(".out_proj." in name), 2 * keys * config["linear_key_head_dim"] if behind_keys else 0


def _with_swapped_value_heads(
    config: Mapping[str, Plain], name: str, values: np.ndarray, *, to_gguf: bool
) -> np.ndarray:
    """Return the parameter `name` with the value heads of a gated delta net in GGUF's order if `to_gguf`, from
    `values` in Hugging Face's order, or the reverse. Other parameters are returned unchanged."""
    if (found := _value_heads(config, name)) is None:
        return values
    axis, first = found
    keys = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // keys
    heads, groups = values[first:], (keys, shared) if to_gguf else (shared, keys)
    swapped = heads.reshape(*heads.shape[:axis], *groups, -1).swapaxes(axis, axis + 1)
    return np.concatenate([values[:first], swapped.reshape(heads.shape)])


def _splits_blocks(config: Mapping[str, Plain], name: str, dtype: str) -> bool:
    """Return whether the value heads of the parameter `name` can be reordered only after dequantising, because a block
    of its `dtype` holds weights of several heads."""
    found = _value_heads(config, name)
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return found is not None and found[0] == 1 and config["linear_value_head_dim"] % block != 0


def _paired_heads(config: Mapping[str, Plain], name: str) -> int:
    """Return the number of heads of a query or key projection whose rows are interleaved; 0 for any other parameter."""
    if not FAMILIES[config["model_type"]].interleaved:
        return 0
    keys = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    return next((config[key] for part, key in keys.items() if part in name), 0)


def _is_offset(config: Mapping[str, Plain], name: str) -> bool:
    has_offset = SUPPORTED_ARCHITECTURES[config["model_type"]].norm_offset != 0
    return has_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
