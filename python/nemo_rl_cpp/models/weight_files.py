"""Reads the weights of a Hugging Face folder and compares them with a model's parameters. Needs no torch."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import GGUF_FILE, GGUF_TABLE, ModelFolderError
from nemo_rl_cpp.models.fused_experts import is_fused, split_experts
from nemo_rl_cpp.models.hf_config import read_json

if TYPE_CHECKING:
    import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}  # fmt: skip
_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Quantised formats of ggml."""
_READ = ("F64", "F32", "F16", "BF16", *_BLOCKS)
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class RawTensor(NamedTuple):
    """A tensor as it is stored in its file. `dtype` is its name in safetensors ("F32", "BF16"), or in ggml for a
    block format ("Q4_0"); `data` is memory-mapped and only valid until the next tensor is requested."""

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
    the files of the index. For a folder of `hub.sources.gguf_folder`, return the GGUF file.

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
        raise ModelFolderError(
            f"{index} has no weight_map that names a file for each tensor: copy or download it again"
        )
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
    """Return the end of an error message for a folder without usable safetensors: the other files of weights that it
    holds, and the remedy."""
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
    """Return name -> entry from the header of a safetensors file. The file begins with the header's length in eight
    bytes and the header in JSON; the tensors follow without gaps.

    Raises ModelFolderError if the file is truncated or does not match its header."""
    if file.name == GGUF_FILE:
        from nemo_rl_cpp.models.gguf_weights import LinkedTensors

        return {name: TensorEntry(*place) for name, place in LinkedTensors(file.parent).places.items()}
    # The library's safe_open imports numpy: 0.1 to 0.3 s per command; this function takes under a millisecond.
    try:
        with file.open("rb") as handle:
            start = handle.read(64)
            if start.startswith(b"version https://git-lfs"):
                raise ModelFolderError(
                    f"{file} is a git-lfs pointer, not the weights: fetch the file itself with `git lfs pull`"
                )
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


def _entry(name: str, said: Mapping[str, Plain], begins: int) -> TensorEntry:
    dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
    if dtype in _BYTES and end - begin != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"its header gives {name} {end - begin} bytes, but says {dtype} {shape}")
    return TensorEntry(dtype, shape, begins + begin, begins + end)


def _damaged(file: Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(f"{file} is not a whole safetensors file ({error}): copy or download it again")


# -- all files ----------------------------------------------------------------------------------------------------------


def all_entries(files: Iterable[Path]) -> Iterator[tuple[Path, str, TensorEntry]]:
    """Yield (file, name, entry) for every tensor of the files. Raise ModelFolderError for a damaged file, or if two
    files hold the same name."""
    places: dict[str, Path] = {}
    for file in files:
        for name, entry in tensor_entries(file).items():
            if name in places:
                raise ModelFolderError(
                    f"{places[name]} and {file} both hold {name}: remove the file that is not of this model"
                )
            places[name] = file
            yield file, name, entry


def raw_tensors(files: Iterable[Path]) -> Iterator[tuple[str, RawTensor]]:
    """Yield (name, tensor) for every tensor of the files, without copying. The safetensors library is not used, because
    it needs torch for bfloat16."""
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for file, name, entry in all_entries(files):
        by_file.setdefault(file, []).append((name, entry))
    for file, entries in by_file.items():
        linked = None
        if file.name == GGUF_FILE:
            from nemo_rl_cpp.models.gguf_weights import LinkedTensors

            linked = LinkedTensors(file.parent)
        try:
            with (
                file.open("rb") as handle,
                mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content,
                memoryview(content) as data,
            ):
                for name, (dtype, shape, begin, end) in entries:
                    with data[begin:end] as tensor:
                        yield name, RawTensor(dtype, shape, linked.restored(name, tensor) if linked else tensor)
                    if hasattr(
                        mmap, "MADV_DONTNEED"
                    ):  # otherwise the pages of tensors already read would count as this process's memory
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
    """Call put(name, tensor) for every parameter of `shapes` that `tensors` contains. `folder` is the source of
    `tensors`, for error messages.

    A critic can be filled from a causal language model: the LM head is skipped, and score.weight may be missing. With
    tied weights, the LM head may replace a missing embedding.

    Raises:
        ModelFolderError: a tensor is missing, unexpected, duplicate, or of the wrong shape or dtype; the message lists
            up to eight tensors of each kind.
    """
    tied = HEAD not in shapes and VALUE_HEAD not in shapes
    missing, wrong, foreign, extra, stood_in = set(shapes), [], [], [], False
    for given, tensor in split_experts(tensors) if is_fused(shapes) else tensors:
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
            if name != HEAD and not name.endswith("rotary_emb.inv_freq") and not name.startswith(_NOT_COMPUTED):
                extra.append(name)
        elif list(tensor.shape) != list(shapes[name]):
            wrong.append(f"{name} is {list(tensor.shape)}, expected {list(shapes[name])}")
        elif isinstance(tensor.dtype, str) and tensor.dtype not in _READ:
            foreign.append(f"{name} is {tensor.dtype}, expected {', '.join(_READ)}")
        else:
            put(name, tensor)
    missing -= {VALUE_HEAD, *([EMBEDDING] if stood_in else [])}
    if missing or wrong or foreign or extra:
        parts = {
            "missing": sorted(missing),
            "of the wrong shape": wrong,
            "of a dtype that is not read": foreign,
            "unexpected": sorted(extra),
        }
        listed = "; ".join(
            f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for what, names in parts.items()
            if names
        )
        advice = ""
        if missing == {HEAD}:
            advice = "; if the head is the embedding, set hf_config_overrides.tie_word_embeddings=true"
        raise ModelFolderError(f"the weights in {folder} do not fit its config.json: {listed}{advice}")


_NOT_COMPUTED = (
    "mtp.",
    "model.visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""Prefixes of tensors that are ignored: multi-token-prediction heads and vision towers of Qwen3.5 and Gemma 3."""


def _known_name(name: str, shapes: Container[str]) -> str:
    """Return the parameter's name in `shapes`. Add the prefix `model.`, which checkpoints of base models lack, and
    remove `language_model.`, which marks the text model in checkpoints of vision-language models."""
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    return f"model.{name}" if name not in shapes and f"model.{name}" in shapes else name


def check_parameters(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise the errors that loading the weights would raise, after reading only the files' headers."""
    entries = ((name, entry) for _, name, entry in all_entries(weight_files(folder)))
    fill_parameters(folder, shapes, entries, lambda name, entry: None)


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
    if head.shape != embedding.shape or not {head.dtype, embedding.dtype} <= set(_READ):
        return True
    with head_file.open("rb") as one, embedding_file.open("rb") as other:
        return not all((a == b).all() for a, b in zip(_values(one, head), _values(other, embedding)))


def decoded(dtype: str, raw: bytes | memoryview) -> np.ndarray:
    """Return a tensor's bytes as a flat float32 array, or as a float64 array if its dtype is F64."""
    import numpy as np

    if dtype in _BLOCKS:
        import gguf

        return gguf.quants.dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType[dtype])
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = np.frombuffer(raw, {"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
    return numbers.astype(np.float32) if dtype == "F16" else numbers


def without_blocks(tensor: RawTensor) -> RawTensor:
    """Return a tensor in a dtype of safetensors. A tensor in a block format becomes float32; any other is returned
    unchanged."""
    if tensor.dtype not in _BLOCKS:
        return tensor
    return RawTensor("F32", tensor.shape, memoryview(decoded(tensor.dtype, tensor.data)).cast("B"))


def _values(handle: BinaryIO, entry: TensorEntry) -> Iterator[np.ndarray]:
    """Yield the tensor's values in order as numpy arrays, float32 or float64, of about a million values each."""
    handle.seek(entry.begin)
    width, left = _BYTES[entry.dtype], (entry.end - entry.begin) // _BYTES[entry.dtype]
    while left:
        count = min(left, 1 << 20)
        left -= count
        raw = handle.read(count * width)
        yield decoded(entry.dtype, raw)
