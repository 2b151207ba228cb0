"""Read the weights of a Hugging Face folder and adapters of PEFT, and compare them with a model's parameters."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from os.path import isfile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import GGUF_FILE, GGUF_TABLE, ModelFolderError
from nemo_rl_cpp.models import granite_hybrid, lfm2
from nemo_rl_cpp.models.architectures import has_experts
from nemo_rl_cpp.models.hf_config import read_json
from nemo_rl_cpp.models.nemotron_h import module_name, our_name
from nemo_rl_cpp.models.qwen3_next import is_fused, module_parts, split_adapters, split_projections

if TYPE_CHECKING:
    import numpy as np

    from nemo_rl_cpp.models.bitsandbytes_weights import QuantisedTensors
    from nemo_rl_cpp.models.gguf_weights import LinkedTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARDS = "model-?????-of-?????.safetensors"
FUSED = "model.layers.0.mlp.experts.0.gate_proj.bias"
"""A parameter that only models with gpt-oss's experts have, whose matrices are fused in checkpoints."""
EMBEDDING, HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}  # fmt: skip
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""The block formats of ggml that are read."""
_READ = ("F64", "F32", "F16", "BF16", "NF4", *_BLOCKS)
_QUANTISED = (".quant_map", ".SCB")
"""Suffixes of the names of tensors that describe a matrix that bitsandbytes quantised, in 4 and in 8 bits."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class RawTensor(NamedTuple):
    """A tensor in the bytes of its file. `dtype` is the name of its type in safetensors ("F32", "BF16"), or in ggml for
    a block format ("Q4_0"). `data` is memory-mapped, and only valid until the next tensor of the files is read."""

    dtype: str
    shape: list[int]
    data: memoryview


class TensorEntry(NamedTuple):
    """A tensor's entry in a file's header: its bytes are `begin` to `end` of the file."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


# -- the files ----------------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. As in transformers, this is model.safetensors if it exists, otherwise
    the files of the index. In a folder that `gguf_folder` made for a GGUF file, return this file.

    Raises ModelFolderError if there are none, the index is damaged, or a file is missing or lies outside the folder."""
    folder = Path(folder)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / GGUF_TABLE).is_file():
            return [folder / GGUF_FILE]
        raise ModelFolderError(
            f"{folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE} (other formats are not read){_other_weights(folder)}"
        )
    weight_map = read_json(index).get("weight_map")
    if not (weight_map and isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())):
        raise ModelFolderError(f"{index} has no weight_map with a file for each tensor: copy or download it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ModelFolderError(f"{index} names the file {name!r}: a file inside the folder was expected")
    # isfile returns False for a name that is too long, for which pathlib raises an error
    if absent := [name for name in names if not isfile(folder / name)]:
        raise ModelFolderError(f"{index} names files that are not there: {', '.join(absent)}")
    return [folder / name for name in names]


def _other_weights(folder: Path) -> str:
    """Return the end of an error message: the other files of weights that the folder holds, and the remedy."""
    if (adapter := saved_adapter(folder)) is not None:
        model = "load the base with transformers, the adapter with PEFT, and write the model with merge_and_unload and save_pretrained"
        return f"; it holds {ADAPTER}/, an adapter of {adapter.base} in {adapter.quantization}: {model}"
    if found := sorted(file.name for file in folder.glob("*.safetensors")):
        return f"; it holds {found[0]}, which counts only where {INDEX_FILE} names it: copy or download the index, too"
    others = (file.name for pattern in ("*.bin", "*.gguf", "consolidated*", "*.pt*") for file in folder.glob(pattern))
    if found := next(others, None):
        if found.endswith(".gguf"):
            return f"; it holds {found}: name that file as the model"
        return f"; it holds {found}: load the model with transformers and write it with save_pretrained"
    return ""


# -- one file -----------------------------------------------------------------------------------------------------------


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Return {name of a tensor: its `TensorEntry`} for all tensors of a file. Raise ModelFolderError if the file is
    truncated or does not match its header."""
    return _contents(file)[0]


def _header(file: Path) -> dict[str, TensorEntry]:
    """Return the entries in the header of a safetensors file: eight bytes of its length, and then JSON."""
    # The library's safe_open imports numpy: 0.1 to 0.3 s per command; this function takes under a millisecond.
    try:
        with file.open("rb") as handle:
            start = handle.read(64)
            if start.startswith(b"version https://git-lfs"):
                raise ModelFolderError(f"{file} is a git-lfs pointer: fetch the file itself with `git lfs pull`")
            length, size = int.from_bytes(start[:8], "little"), file.stat().st_size
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header of {length} bytes does not fit its {size} bytes")
            handle.seek(8)
            header = json.loads(handle.read(length).decode("utf-8"))
        entries = {name: _entry(name, said, 8 + length) for name, said in header.items() if name != "__metadata__"}
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end or entry.end < end:
                raise ValueError(f"{name} begins at byte {entry.begin}, but the tensor before it ends at {end}")
            end = entry.end
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, and the file at {size}")
    except ModelFolderError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise _damaged(file, error) from None
    return entries


def _contents(file: Path) -> tuple[dict[str, TensorEntry], LinkedTensors | QuantisedTensors | None]:
    """Return (a file's entries, the object that converts its stored bytes to dtypes that the native core reads). The
    object is None unless the file is a GGUF file or was quantised by bitsandbytes."""
    if file.name == GGUF_FILE:
        from nemo_rl_cpp.models.gguf_weights import LinkedTensors

        restores = LinkedTensors(file.parent)
    else:
        entries = _header(file)
        if not any(name.endswith(_QUANTISED) for name in entries):
            return entries, None
        from nemo_rl_cpp.models.bitsandbytes_weights import QuantisedTensors

        restores = QuantisedTensors(file, entries)
    return {name: TensorEntry(*place) for name, place in restores.places.items()}, restores


def _entry(name: str, said: Mapping[str, Plain], begins: int) -> TensorEntry:
    dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
    if dtype in _BYTES and end - begin != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"its header gives {name} {end - begin} bytes, but says {dtype} {shape}")
    return TensorEntry(dtype, shape, begins + begin, begins + end)


def _damaged(file: Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(f"{file} is not a whole safetensors file ({error}): copy or download it again")


# -- all files ----------------------------------------------------------------------------------------------------------


def all_entries(files: Iterable[Path]) -> Iterator[tuple[Path, str, TensorEntry]]:
    """Yield (file, tensor's name, `TensorEntry`) from the files' headers. Raise ModelFolderError for a damaged file."""
    for file in files:
        for name, entry in tensor_entries(file).items():
            yield file, name, entry


def raw_tensors(files: Iterable[Path]) -> Iterator[tuple[str, RawTensor]]:
    """Yield (name, tensor) of the files, without copying. The safetensors library would need torch for bfloat16."""
    contents = {file: _contents(file) for file in files}  # a damaged file is found before the first tensor is read
    for file, (entries, restores) in contents.items():
        try:
            with (
                file.open("rb") as handle,
                mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content,
                memoryview(content) as data,
            ):
                for name, (dtype, shape, begin, end) in entries.items():
                    with data[begin:end] as tensor:
                        yield name, RawTensor(dtype, shape, restores.restored(name, tensor) if restores else tensor)
                    # otherwise the pages of tensors already read would count as this process's memory
                    content.madvise(mmap.MADV_DONTNEED)
        except OSError as error:
            raise _damaged(file, error) from None


# -- a model's parameters ---------------------------------------------------------------------------------------------------


def fill_parameters(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, RawTensor | TensorEntry]],
    put: Callable[[str, RawTensor | TensorEntry], None],
) -> None:
    """Call put(name, tensor) for every parameter of `shapes` that is among `tensors`, the (name, tensor) pairs read
    from `folder`. A critic may be filled from a causal language model: its LM head is skipped, and score.weight may be
    missing. With tied weights, the LM head may replace a missing embedding. Raise ModelFolderError for a missing,
    unexpected, duplicate or misshapen tensor or dtype; the message lists up to eight of each kind."""
    tied = HEAD not in shapes and VALUE_HEAD not in shapes
    missing, wrong, foreign, extra, stood_in = set(shapes), [], [], [], False
    for given, tensor in split_experts(
        split_projections(granite_hybrid.split_mlps(tensors, shapes), folder), FUSED in shapes
    ):
        name = _known_name(given, shapes)
        if tied and name == HEAD and EMBEDDING in missing:
            name, stood_in = EMBEDDING, True
        elif name in shapes and name not in missing:
            extra.append(f"{given} (a second {name})")
            continue
        else:
            missing.discard(name)
        if name not in shapes:
            # a tied LM head, or one that a critic does not need
            computed = name != HEAD and not name.endswith("rotary_emb.inv_freq") and not name.startswith(_NOT_COMPUTED)
            if computed and not _predicts_more_tokens(name, shapes) and not _is_replaced(name, shapes):
                extra.append(name)
        elif list(tensor.shape) != list(shapes[name]):
            wrong.append(f"{name} is {list(tensor.shape)}, expected {list(shapes[name])}")
        elif isinstance(tensor.dtype, str) and tensor.dtype not in _READ:
            foreign.append(f"{name} is {tensor.dtype}, expected {', '.join(_READ)}")
        else:
            put(name, tensor)
    missing -= {VALUE_HEAD, *([EMBEDDING] if stood_in else [])}
    if missing or wrong or foreign or extra:
        parts = {"missing": sorted(missing), "of the wrong shape": wrong, "of a dtype that is not read": foreign}
        parts["unexpected"] = sorted(extra)
        shown = {what: ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") for what, names in parts.items()}
        listed = "; ".join(f"{what}: {names}" for what, names in shown.items() if names)
        is_tied = missing == {HEAD}
        advice = "; if the head is the embedding, set hf_config_overrides.tie_word_embeddings=true" if is_tied else ""
        raise ModelFolderError(f"the weights in {folder} do not fit its config.json: {listed}{advice}")


_NOT_COMPUTED = (
    "mtp.", "model.visual.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.embed_vision.", "model.vision_embedder.", "model.audio_tower.", "model.embed_audio.",
)  # fmt: skip
"""Prefixes of tensors that are ignored: multi-token-prediction heads and the towers of Qwen3.5, Gemma 3 and Gemma 4."""


def _predicts_more_tokens(name: str, shapes: Container[str]) -> bool:
    """Return whether the tensor `name` belongs to a multi-token-prediction layer, which follows the last layer
    (GLM-4.5)."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None:
        return False
    layer, last = int(found[1]), int(found[1]) - 1
    norms = ("input_layernorm", "norm", "operator_norm")
    is_behind = not any(f"model.layers.{layer}.{norm}.weight" in shapes for norm in norms)
    return is_behind and f"model.layers.{last}.mlp.gate.e_score_correction_bias" in shapes


def _is_replaced(name: str, shapes: Container[str]) -> bool:
    """Return whether the tensor `name` belongs to the keys or values of a layer that reads those of an earlier one
    (Gemma 4), for which released checkpoints still have it."""
    layer, _, part = name.partition(".self_attn.")
    is_own = part.startswith("q_proj.") or f"{layer}.self_attn.k_proj.weight" in shapes
    return not is_own and f"{layer}.layer_scalar" in shapes and part.split("_")[0] in ("k", "v")


def _known_name(name: str, shapes: Container[str]) -> str:
    """Return the name in `shapes` of the tensor `name`, which a checkpoint of Nemotron-H, LFM2, a base model or a
    vision-language model may spell differently."""
    name = our_name(name) if name.startswith("backbone.") else lfm2.our_name(name)
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    return f"model.{name}" if name not in shapes and f"model.{name}" in shapes else name


# -- tied weights -----------------------------------------------------------------------------------------------------------


def head_differs(folder: Path) -> bool:
    """Return whether the weights hold an LM head that differs from the embedding; False if either is missing."""
    found = {}
    for file, name, entry in all_entries(weight_files(folder)):
        known = _known_name(name, {HEAD, EMBEDDING})
        if known in (HEAD, EMBEDDING):
            found[known] = (file, entry)
    if len(found) < 2:
        return False
    (head_file, head), (embedding_file, embedding) = found[HEAD], found[EMBEDDING]
    plain = all(e.end - e.begin == math.prod(e.shape) * _BYTES.get(e.dtype, 0) for e in (head, embedding))
    if head.shape != embedding.shape or not plain or not {head.dtype, embedding.dtype} <= set(_READ):
        return True
    with head_file.open("rb") as one, embedding_file.open("rb") as other:
        return not all((a == b).all() for a, b in zip(_values(one, head), _values(other, embedding)))


def decoded(dtype: str, raw: bytes | memoryview) -> np.ndarray:
    """Return a tensor's bytes as a flat float32 array, or as a float64 array if its dtype is F64."""
    import numpy as np

    if dtype == "NF4":
        from nemo_rl_cpp.models.bitsandbytes_weights import decoded_blocks

        return decoded_blocks(raw)
    if dtype in _BLOCKS:
        import gguf

        return gguf.quants.dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType[dtype])
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = np.frombuffer(raw, {"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
    return numbers.astype(np.float32) if dtype == "F16" else numbers


def without_blocks(tensor: RawTensor) -> RawTensor:
    """Return a tensor in a dtype of safetensors: float32 if it is in a block format, otherwise unchanged."""
    if tensor.dtype not in ("NF4", *_BLOCKS):
        return tensor
    return RawTensor("F32", tensor.shape, memoryview(decoded(tensor.dtype, tensor.data)).cast("B"))


_AT_ONCE = 1 << 24  # elements of a matrix that are decoded at a time: Gemma 4's per-layer table is large


def row_parts(tensor: RawTensor) -> Iterator[tuple[int, RawTensor]]:
    """Yield (index of the first row, these rows in a dtype of safetensors) for a few rows of a tensor at a time."""
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    row, count = tensor.data.nbytes // rows, max(1, _AT_ONCE // columns)
    for first in range(0, rows, count):
        data = tensor.data[first * row : (first + count) * row]
        part = tensor._replace(shape=[min(count, rows - first), *tensor.shape[1:]], data=data)
        yield first, without_blocks(part)


def _values(handle: BinaryIO, entry: TensorEntry) -> Iterator[np.ndarray]:
    """Yield the tensor's values in order as numpy arrays, float32 or float64, of about a million values each."""
    handle.seek(entry.begin)
    width, left = _BYTES[entry.dtype], (entry.end - entry.begin) // _BYTES[entry.dtype]
    while left:
        count = min(left, 1 << 20)
        left -= count
        raw = handle.read(count * width)
        yield decoded(entry.dtype, raw)


# -- fused experts ------------------------------------------------------------------------------------------------------

# A checkpoint of gpt-oss holds for all E experts of a layer, with D hidden and I expert columns:
#
#     mlp.experts.gate_up_proj [E, D, 2I]     columns gate, up, gate, up, ...     gate_up_proj_bias [E, 2I]
#     mlp.experts.down_proj    [E, I, D]                                          down_proj_bias    [E, D]
#
# or in MXFP4 (Open Compute Project, Microscaling Formats 1.0) gate_up_proj_blocks [E, 2I, D/32, 16] with
# gate_up_proj_scales [E, 2I, D/32], and down_proj_blocks [E, D, I/32, 16] with down_proj_scales [E, D, I/32]: a byte of
# a block holds two values of 4 bits, the lower bits first, and a scale s multiplies 32 values by 2^(s - 127).
#
# A released checkpoint of Qwen3.5 or Gemma 4 holds gate_up_proj [E, 2I, D], rows first gate, then up, and down_proj
# [E, D, I].
#
# The native core reads mlp.experts.E.{gate_proj,up_proj,down_proj}.{weight,bias} (Gemma 4: experts.E. ...), matrices as
# [out, in].
_FUSED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_WORDS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}  # integers, because numbers are only moved
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def split_experts(
    tensors: Iterable[tuple[str, RawTensor | TensorEntry]], is_gpt_oss: bool
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield the tensors of a checkpoint, with fused experts split into the matrices and biases of single experts, which
    get the native core's names. MXFP4 becomes bfloat16, which holds every value exactly.

    A tensor of fused experts with an unexpected number of dimensions is yielded unchanged. Entries of a file's header
    (`TensorEntry`) are split in the same way, without data."""
    halves: dict[str, RawTensor | TensorEntry] = {}
    for name, tensor in tensors:
        found = _FUSED.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        prefix, matrix, kind = found.groups()
        if not is_gpt_oss:
            names = ["down_proj"] if matrix == "down_proj" else ["gate_proj", "up_proj"]
            fits = kind is None and len(tensor.shape) == 3 and tensor.shape[1] % len(names) == 0
            yield from _stacked_experts(prefix, names, tensor) if fits else [(name, tensor)]
            continue
        scales = None
        if kind in ("_blocks", "_scales"):
            other = halves.pop(prefix + matrix, None)
            if other is None:  # its data is copied, because it is only valid until the next tensor is read
                has_data = isinstance(tensor, RawTensor)
                halves[prefix + matrix] = tensor._replace(data=memoryview(bytes(tensor.data))) if has_data else tensor
                continue
            tensor, scales = (tensor, other) if kind == "_blocks" else (other, tensor)
            fits = len(tensor.shape) == 4 and list(tensor.shape) == [*scales.shape, 16]
        else:
            fits = tensor.dtype in _WORDS and len(tensor.shape) == (2 if kind else 3)
        if fits:
            yield from _single_experts(prefix, matrix, tensor, scales)
        else:
            yield name, tensor
    for name, tensor in halves.items():
        yield f"{name}_blocks without {name}_scales, or the reverse", tensor


def _stacked_experts(
    prefix: str, names: Sequence[str], tensor: RawTensor | TensorEntry
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield (name, view) of each expert's matrices. `tensor` [experts, rows, columns] has for each expert the matrices
    `names` one below the other, with equal numbers of rows."""
    count, rows, columns = tensor.shape
    part = tensor._replace(shape=[rows // len(names), columns])
    for index in range(count * len(names)):
        name = f"{prefix}{index // len(names)}.{names[index % len(names)]}.weight"
        if isinstance(tensor, TensorEntry):
            yield name, part
            continue
        size = len(tensor.data) // (count * len(names))
        with tensor.data[index * size : (index + 1) * size] as data:
            yield name, part._replace(data=data)


def _single_experts(
    prefix: str, matrix: str, tensor: RawTensor | TensorEntry, scales: RawTensor | TensorEntry | None
) -> Iterator[tuple[str, RawTensor | TensorEntry]]:
    """Yield (name, tensor) of each expert's matrices or biases in `tensor`, which holds those of all experts. In
    gate_up_proj the even rows are gate's, the odd ones up's."""
    parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    if matrix == "down_proj":
        parts = {"down_proj": slice(None)}
    kind = "bias" if len(tensor.shape) == 2 else "weight"
    rows, *columns = tensor.shape[:0:-1] if scales is None else (tensor.shape[1], tensor.shape[2] * 32)
    part = tensor._replace(dtype=tensor.dtype if scales is None else "BF16", shape=[rows // len(parts), *columns])
    for expert in range(tensor.shape[0]):
        for name, every in parts.items():
            if isinstance(tensor, RawTensor):
                part = part._replace(data=_expert_rows(tensor, scales, expert, every))
            yield f"{prefix}{expert}.{name}.{kind}", part


def _expert_rows(tensor: RawTensor, scales: RawTensor | None, expert: int, every: slice) -> memoryview:
    """Return a copy of the bytes of the rows `every` of one expert's matrix [out, in] or bias [out]."""
    import numpy as np

    if scales is None:
        rows = np.frombuffer(tensor.data, _WORDS[tensor.dtype]).reshape(tensor.shape)[expert].T[every]
    else:
        blocks = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)[expert][every]
        powers = np.frombuffer(scales.data, np.uint8).reshape(scales.shape)[expert][every].astype(np.uint16)
        rows = _mxfp4_pairs()[(powers[..., None] << 8) | blocks]
    return memoryview(np.array(rows, order="C").view(np.uint8).reshape(-1))


@cache
def _mxfp4_pairs() -> np.ndarray:
    """Return the table whose entry `scale * 256 + byte` is the pair of bfloat16 values, 32 bits, of an MXFP4 byte."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float32) - 127)
        values = powers[:, None] * np.array(_FP4, np.float32)
    words = values.view(np.uint32) >> 16
    byte = np.arange(256)
    return np.ascontiguousarray(words[:, byte & 15] | (words[:, byte >> 4] << 16)).reshape(-1)


# -- adapters -----------------------------------------------------------------------------------------------------------

ADAPTER = "adapter"
"""The adapter's subfolder in the folder of the weights."""
CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "base.json"
"""The first two are PEFT's files; the last identifies the base weights of the adapter."""
PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_INNER = ".base_layer"
"""PEFT's name for the gate_up_proj of a layer's experts; their down_proj has the name of the module."""


def name_in_text_model(name: str) -> str:
    """Return the name of an adapter's tensor without PEFT's prefix. A name from the vision-language model of Gemma 3
    becomes the name in its text model."""
    return name.removeprefix(PREFIX).replace("model.language_model.", "model.", 1)


def adapted_modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules that an adapter changes, given the `names` of its tensors, in the order of `names`. Fused
    projections count as the native core's matrices."""
    found = (name_in_text_model(name).removesuffix(LORA_A) for name in names if name.endswith(LORA_A))
    return list(dict.fromkeys(part for name in found for part in module_parts(name.removesuffix(_INNER))))


def alternates_in_peft(name: str, is_gpt_oss: bool) -> bool:
    """Return whether the rows of PEFT's adapter tensor `name` are gate, up, gate, up, ..., as for gpt-oss's experts."""
    return is_gpt_oss and name.endswith(_INNER + LORA_B)


def _even_then_odd(tensor: RawTensor) -> memoryview:
    """Return a copy of a matrix with its even rows before its odd rows."""
    import numpy as np

    rows = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0] // 2, 2, -1)
    return memoryview(rows.swapaxes(0, 1).copy().reshape(-1))


@dataclass(frozen=True)
class SavedAdapter:
    """A LoRA adapter that was saved without its quantised base model: the names of the adapted weights, the saving
    run's `model_name`, the seed of random base weights, the format of its matrices, and its config.json."""

    folder: Path
    dim: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...]
    base: str
    seed: int
    quantization: str
    config: Mapping[str, Plain]

    def tensors(self) -> Iterator[tuple[str, RawTensor]]:
        """Yield (name, tensor) for the matrices A [dim, in] and B [out, dim] of every adapted matrix [out, in]; `dim`
        is the rank. For experts they are A [experts · dim, in] and B [out, dim · experts], gate's rows before up's."""
        found, name_of = raw_tensors([self.folder / WEIGHTS_FILE]), name_reader(self.config)
        for name, tensor in self._split(found) if is_fused(self.config) else found:
            is_mixed = alternates_in_peft(name, self.config["model_type"] == "gpt_oss")
            data = _even_then_odd(tensor) if is_mixed else tensor.data
            yield name_of(name_in_text_model(name)), tensor._replace(data=data)

    def _split(self, tensors: Iterable[tuple[str, RawTensor]]) -> Iterator[tuple[str, RawTensor]]:
        import numpy as np

        whole = {name: np.frombuffer(raw.data, np.float32).reshape(raw.shape).copy() for name, raw in tensors}
        for name, part in split_adapters(whole, self.config, self.dim).items():
            yield name, RawTensor("F32", list(part.shape), memoryview(np.ascontiguousarray(part)).cast("B"))


def name_reader(config: Mapping[str, Plain]) -> Callable[[str], str]:
    """Return the function that maps PEFT's names of a model's tensors to the native core's. `config`: its config.json."""
    if config["model_type"] in granite_hybrid.MODEL_TYPES:
        return partial(granite_hybrid.our_name, has_experts=has_experts(config))
    return lfm2.our_name if config["model_type"] in lfm2.MODEL_TYPES else our_name


def name_writer(config: Mapping[str, Plain]) -> Callable[[str], str]:
    """Return the function that maps the native core's names of a model's tensors and modules to PEFT's, the inverse of
    `name_reader`. PEFT's own names are returned unchanged."""
    if config["model_type"] in granite_hybrid.MODEL_TYPES:
        return granite_hybrid.checkpoint_name
    if config["model_type"] in lfm2.MODEL_TYPES:
        return lfm2.checkpoint_name
    return module_name if config["model_type"] == "nemotron_h" else str


def saved_adapter(weights: Path) -> SavedAdapter | None:
    """Return the adapter that `weights` holds in place of the weights of a quantised model, or None."""
    folder = weights / ADAPTER
    if not (folder / BASE_FILE).is_file() or (weights / SINGLE_FILE).is_file() or (weights / INDEX_FILE).is_file():
        return None
    peft, base = (json.loads((folder / name).read_text()) for name in (CONFIG_FILE, BASE_FILE))
    if "quantization" not in base:
        return None
    modules = adapted_modules_of(tensor_entries(folder / WEIGHTS_FILE))
    config = read_json(weights / "config.json")
    targets = tuple(map(name_reader(config), (f"{module}.weight" for module in modules)))
    return SavedAdapter(
        folder, peft["r"], float(peft["lora_alpha"]), peft.get("use_rslora", False), targets,
        base["model_name"], base["seed"], base["quantization"], config,
    )  # fmt: skip
