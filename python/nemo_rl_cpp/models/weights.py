"""A native model's weights: views by name, tensor-parallel slices, and Hugging Face folders (safetensors)."""

import json
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models import granite_hybrid, lfm2, weight_files
from nemo_rl_cpp.models.nemotron_h import checkpoint_name
from nemo_rl_cpp.models.qwen3_next import is_fused, joined_projections
from nemo_rl_cpp.stages import work

DEFAULT_SHARD_BYTES = 5 * 1000**3
_AT_ONCE = 1 << 24
"""Elements of a matrix that exist in float32 at a time while it is drawn."""
FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def own_part(spec: C.ParameterSpec, whole: Tensor) -> Tensor:
    """Return a view of this process's tensor-parallel slice of `whole`, a parameter of shape spec.whole."""
    if spec.split < 0:
        return whole
    return whole.narrow(spec.split, spec.begin, spec.shape[spec.split])


@dataclass
class Slices:
    """The layouts (names, shapes and offsets of parameters) of the whole model and of the tensor-parallel slice of each
    rank, and the exchange of slices between ranks over `ranks.tensor`."""

    ranks: Ranks
    layouts: Sequence[C.ParameterLayout]
    whole: C.ParameterLayout

    @classmethod
    def of(cls, native: dict[str, Plain], ranks: Ranks) -> Self:
        """Return the slices of a model. `native` describes the whole model, see `ModelFolder.native`."""
        count = ranks.tensor_size
        return cls(ranks, [C.ParameterLayout(native, rank, count) for rank in range(count)], C.ParameterLayout(native))

    @property
    def own(self) -> C.ParameterLayout:
        return self.layouts[self.ranks.tensor_rank]

    def take(self, whole: Tensor) -> Tensor:
        """Return this process's slice of `whole`, a flat buffer of the whole model."""
        if self.ranks.tensor_size == 1:
            return whole
        flat = whole.new_zeros(self.own.total)
        for spec, part in zip(self.whole.specs, self.own.specs):
            _view(flat, part).copy_(own_part(part, _view(whole, spec)))
        return flat

    def gather(self, flat: Tensor | None, what: str) -> Tensor | None:
        """Gather the slices of a flat buffer (`flat`, this process's slice) from all tensor-parallel ranks. Return the
        whole model's buffer on the first rank, and None on the others. `what` names the buffer in error messages."""
        if self.ranks.tensor_size == 1 or flat is None:
            return flat
        peers, phase = self.ranks.tensor, f"gathering the slices of {what}"
        if self.ranks.tensor_rank > 0:
            peers.send(flat.contiguous(), to=0, phase=phase)
            return None
        whole = flat.new_zeros(self.whole.total)
        for rank, layout in enumerate(self.layouts):
            theirs = flat if rank == 0 else flat.new_empty(layout.total)
            if rank > 0:
                peers.receive(theirs, source=rank, phase=phase)
            for spec, part in zip(self.whole.specs, layout.specs):
                own_part(part, _view(whole, spec)).copy_(_view(theirs, part))
        return whole


def _view(flat: Tensor, spec: C.ParameterSpec) -> Tensor:
    return flat[spec.offset : spec.offset + prod(spec.shape)].view(spec.shape)


def named_views(specs: Iterable[C.ParameterSpec], flat: Tensor) -> dict[str, Tensor]:
    """Return {Hugging Face name: view} of every parameter in `specs`, which describe the buffer `flat`."""
    return {spec.name: _view(flat, spec) for spec in specs}


def buffers(model: C.DecoderModel) -> dict[str, Tensor]:
    """Return {name: tensor} for the tensors of the checkpoint that are not trained (csrc/model/parameters.h)."""
    return {spec.name: model.blocks_of(spec) for spec in model.blocks if len(spec.shape) == 1}


def load_weights(model: C.DecoderModel, folder: str | Path) -> None:
    """Fill a native `DecoderModel`, or its tensor-parallel slice, from the weights of a folder, converted if their
    dtype differs. If a critic is loaded from a causal language model, its scalar head starts at zero, so the first
    values are 0. The matrices of a quantised model are quantised one by one; blocks of its format are copied. Raise
    ModelFolderError for damaged files, and missing, unexpected or misshapen tensors, listing up to eight of each
    kind."""
    folder = Path(folder)
    target = named_views(model.specs, model.compute if model.masters is None else model.masters)
    specs = {spec.name: spec for spec in model.specs}
    if "score.weight" in target:
        target["score.weight"].zero_()
    blocks = {spec.name: spec for spec in model.blocks}
    shapes = {name: spec.whole for name, spec in specs.items()} | {name: spec.shape for name, spec in blocks.items()}
    files = weight_files.weight_files(folder)
    with warnings.catch_warnings(), work(f"reading {folder}", sum(file.stat().st_size for file in files)) as advance:
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # the buffer is only read

        def put(name: str, raw: weight_files.RawTensor) -> None:
            if name in blocks:
                own, rows = model.blocks_of(blocks[name]), blocks[name].shape[0]
                if own.dim() == 1:
                    own.copy_(tensor_of(raw))
                elif (
                    raw.dtype in ("Q8_0", "Q4_0", "NF4") and raw.data.nbytes == rows * own.shape[1]
                ):  # the model's format
                    file_rows = torch.frombuffer(raw.data, dtype=torch.uint8).view(rows, -1)
                    C.write_block_rows(file_rows, own, blocks[name].shape[1], blocks[name].begin)
                else:
                    for first, part in _parts(raw):
                        pack_blocks(model, blocks[name], part, first)
            elif specs[name].split < 0:
                for first, part in _parts(raw):
                    target[name][first : first + len(part)].copy_(part)
            else:
                target[name].copy_(own_part(specs[name], tensor_of(raw)))
            advance(raw.data.nbytes)

        weight_files.fill_parameters(folder, shapes, weight_files.raw_tensors(files), put)
    model.masters_changed()


def pack_blocks(model: C.DecoderModel, spec: C.BlockSpec, weights: Tensor, first: int = 0) -> None:
    """Quantise `weights` [rows, columns] of any floating dtype, and store them as rows of the parameter `spec` from its
    row `first`."""
    is_read = weights.dtype in (torch.float32, torch.bfloat16)
    C.pack_blocks(weights if is_read else weights.float(), model.blocks_of(spec), spec.begin + first)


def _parts(raw: weight_files.RawTensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first row, tensor) for a few rows of a tensor at a time, see `tensor_of`."""
    return ((first, tensor_of(rows)) for first, rows in weight_files.row_parts(raw))


def tensor_of(raw: weight_files.RawTensor) -> torch.Tensor:
    """Return the tensor as a view of its memory-mapped bytes. A tensor in a block format becomes float32."""
    raw = weight_files.without_blocks(raw)
    return torch.frombuffer(raw.data, dtype=FILE_DTYPES[raw.dtype]).view(raw.shape)


def remove_weights(folder: Path) -> None:
    """Remove the weights of an earlier save from the folder. Together with new weights they would be ambiguous."""
    for old in (folder / weight_files.SINGLE_FILE, folder / weight_files.INDEX_FILE, *folder.glob(weight_files.SHARDS)):
        old.unlink(missing_ok=True)


def save_config(folder: Path, config: Mapping[str, Plain], dtype: torch.dtype) -> None:
    """Write config.json with the weights' `dtype` into a folder, and remove an earlier save's weights from it."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_weights(folder)
    name = str(dtype).removeprefix("torch.")
    saved = {**config, "dtype": name, "torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")


def save_weights(
    model: C.DecoderModel, folder: str | Path, config: Mapping[str, Plain], max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Write config.json, and `tensors` (None: the model's weights) in their dtype, as one safetensors file, or as
    several with an index if they exceed `max_shard_bytes`."""
    folder = Path(folder)
    save_config(folder, config, model.compute.dtype)
    tensors = named_views(model.specs, model.compute) | buffers(model) if tensors is None else tensors
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    written: Iterable[tuple[str, torch.Tensor]] = tensors.items()
    if weight_files.FUSED in tensors:
        written = joined_experts(tensors, is_gpt_oss=True)
    elif is_fused(config):
        written = joined_projections(tensors, config)
    elif config["model_type"] == "gemma4_text":
        written = joined_experts(tensors, is_gpt_oss=False)
    elif config["model_type"] in granite_hybrid.MODEL_TYPES:
        written = granite_hybrid.joined_mlps(joined_experts(tensors, is_gpt_oss=False))
    for name, tensor in written:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        if config["model_type"] == "nemotron_h":
            name = checkpoint_name(name)
        elif config["model_type"] in lfm2.MODEL_TYPES:
            name = lfm2.checkpoint_name(name)
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / weight_files.SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / weight_files.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


_EXPERT = re.compile(r"(.*\.experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)")


def joined_experts(tensors: Mapping[str, torch.Tensor], is_gpt_oss: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as in a checkpoint with fused experts, the inverse of `weight_files.split_experts`: the
    matrices of single experts in `tensors` are stacked, all others are unchanged. Each tensor is created only when it
    is requested."""
    experts: dict[str, list[str]] = {}
    for name in tensors:
        if (found := _EXPERT.fullmatch(name)) is None:
            yield name, tensors[name]
            continue
        prefix, matrix, kind = found.groups()
        if matrix != "up":
            fused = f"{prefix}{'down' if matrix == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
            experts.setdefault(fused, []).append(name)

    def whole(name: str) -> Tensor:
        if "gate_proj" not in name:
            return tensors[name]
        parts = [tensors[name], tensors[name.replace("gate_proj", "up_proj")]]
        return torch.stack(parts, dim=1).flatten(0, 1) if is_gpt_oss else torch.cat(parts)

    for fused, names in experts.items():
        yield fused, torch.stack([whole(name).t() if is_gpt_oss else whole(name) for name in names])


_NORMS = ("norm.weight", "norm_1.weight", "norm_2.weight")


def initialize_weights(model: C.DecoderModel, seed: int, std: float = 0.02, norm_offset: float = 0.0) -> None:
    """Initialise a random model: normally distributed matrices, norms that scale by 1 (`norm_offset` is added to their
    weights, except in gated delta nets), zero biases. Equal seeds give equal weights, also before quantisation. An
    untied LM head gets a tenth of the other matrices' standard deviation, so that the first policy is nearly uniform:
    reinforcement learning from scratch needs exploration."""
    generator = torch.Generator().manual_seed(seed)
    flat = model.compute if model.masters is None else model.masters
    views = named_views(model.specs, flat)

    def draw(whole: list[int], spread: float) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first row, rows) of a tensor of the shape `whole` of normal random numbers with standard
        deviation `spread`, which are drawn in float32 and rounded to the model's dtype."""
        count = max(1, _AT_ONCE // whole[-1] // 16 * 16)  # a multiple of 16, as torch draws 16 numbers at a time
        for first in range(0, whole[0], count):
            shape = [min(count, whole[0] - first), *whole[1:]]
            yield first, torch.randn(shape, generator=generator, dtype=torch.float32).mul_(spread).to(flat.dtype)

    for spec in _in_order(model):
        name = spec.name
        spread = 0.1 * std if name == "lm_head.weight" else std
        if isinstance(spec, C.BlockSpec) and len(spec.shape) == 1:
            model.blocks_of(spec).fill_(1.0 if name.endswith("layer_scalar") else 0.0)
        elif isinstance(spec, C.BlockSpec):
            for first, rows in draw(spec.shape, spread):
                pack_blocks(model, spec, rows, first)
        elif name.endswith(_NORMS) and not name.endswith("linear_attn.norm.weight"):
            views[name].fill_(1.0 - norm_offset)
        elif name.endswith("mamba.dt_bias"):  # so that the time steps are between 0.001 and 0.1
            steps = torch.rand(spec.whole, generator=generator).mul_(log(100.0)).exp_().mul_(0.001)
            views[name].copy_(steps + torch.log(-torch.expm1(-steps)))
        elif name.endswith(("norm.weight", ".dt_bias", ".D", "router.scale", "router.per_expert_scale")):
            views[name].fill_(1.0)
        elif name.endswith(".A_log"):
            views[name].copy_(torch.rand(spec.whole, generator=generator).mul_(16.0).clamp_(min=0.01).log_())
        elif name.endswith(".bias") or name == "score.weight":
            views[name].zero_()
        elif spec.split < 0:
            for first, rows in draw(spec.whole, spread):
                views[name][first : first + len(rows)].copy_(rows)
        else:
            views[name].copy_(own_part(spec, torch.cat([rows for _, rows in draw(spec.whole, spread)])))
    model.masters_changed()


def _in_order(model: C.DecoderModel) -> Iterator[C.ParameterSpec | C.BlockSpec]:
    """Yield the specifications of all parameters, in the order that they would have without quantisation."""
    blocks = deque(model.blocks)
    for i, spec in enumerate(model.specs):
        while blocks and blocks[0].before == i:
            yield blocks.popleft()
        yield spec
    yield from blocks


def lora_b_for_peft(b: torch.Tensor, dim: int, alternates: bool = False) -> torch.Tensor:
    """Return PEFT's B [out, dim · experts] for `b`, the native core's B: [dim, out], or [experts · dim, out] for
    experts. Column c of the result belongs to expert c % experts. `alternates`: see `alternates_in_peft`."""
    found = b.view(-1, dim, b.shape[1]).permute(2, 1, 0).flatten(1)
    return found.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if alternates else found


def lora_b_from_peft(b: torch.Tensor, dim: int, alternates: bool = False) -> torch.Tensor:
    """Return the native core's B, [dim, out] or [experts · dim, out], for PEFT's `b` [out, dim · experts]: the inverse
    of `lora_b_for_peft` with the same `dim` (the rank) and `alternates`."""
    rows = b.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if alternates else b
    return rows.unflatten(1, (dim, -1)).permute(2, 1, 0).flatten(0, 1)


def add_saved_adapter(model: C.DecoderModel, saved: weight_files.SavedAdapter) -> None:
    """Add the adapter of a checkpoint to a frozen model with loaded weights, without merging it."""
    model.adapt(saved.dim, saved.alpha, list(saved.targets), False, saved.use_rslora)
    views = named_views(model.trained_layout.specs, model.masters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # the buffer is only read
        for name, raw in saved.tensors():
            tensor = tensor_of(raw)
            views[name].copy_(lora_b_from_peft(tensor, saved.dim) if name.endswith(weight_files.LORA_B) else tensor)
    model.masters_changed()
