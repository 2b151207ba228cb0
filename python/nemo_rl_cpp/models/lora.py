"""LoRA adapters of a native model: selection of matrices, initialisation, and saving in PEFT's format.

The model computes with W' = W + s · B · A, rounded to its precision, where s = alpha / dim, or alpha / sqrt(dim) with
use_rslora. With `merge` false it adds the adapters' output to the output of W instead (csrc/model/adapters.h). W is a
frozen weight matrix of `model_name`. A [dim, in] and B [out, dim] are trained in float32."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import FUSED, Adapters, LayerKinds, adapted_modules, is_experts, nothing_adapted
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import TINY_RANDOM, findable_name, published_name
from nemo_rl_cpp.models import weight_files
from nemo_rl_cpp.models.hf_config import read_config_file
from nemo_rl_cpp.models.model_folder import ModelFolder
from nemo_rl_cpp.models.model_sizes import ModelSizes
from nemo_rl_cpp.models.nemotron_h import our_name
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from nemo_rl_cpp.models.qwen3_next import PARTS, fused_module, is_fused, joined_adapters, split_adapters
from nemo_rl_cpp.models.weights import Slices, lora_b_for_peft, lora_b_from_peft, named_views, own_part

# larger than any seed, so that adapters and the weights of a random base model are drawn from different seeds
_STREAM = 2**32


def remove_adapter(weights: Path) -> None:
    """Remove an adapter that `Lora.save` wrote from `weights`, where weights without adapters will be saved."""
    folder = weights / weight_files.ADAPTER
    if (folder / weight_files.BASE_FILE).is_file():  # otherwise a different program wrote it
        for name in (weight_files.CONFIG_FILE, weight_files.WEIGHTS_FILE, weight_files.BASE_FILE):
            (folder / name).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _joined(modules: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the attribute `joined` of `Lora` for the adapted modules `modules`. `shapes`: {name: shape} of the model's
    parameters."""
    found = {}
    for module in modules:
        path, _, name = module.rpartition(".")
        parts = [f"{path}.{part}" for part in FUSED.get(name, ())]
        if parts:
            found[module] = tuple((part, shapes[our_name(f"{part}.weight")][0]) for part in parts)
    return found


_WITH_TOWERS = ("gemma3", "gemma4", "gemma4_unified", "mistral3")


def _among_images(module: str) -> str:
    """Return the name that a module of the text model has within a vision-language model."""
    return module.replace("model.", "model.language_model.", 1)


@dataclass
class Lora:
    """The LoRA adapters of one model. A critic's whole scalar head is trained with them.

    Attributes:
        section: "policy" or "value".
        modules: names of the adapted modules, such as model.layers.0.self_attn.q_proj, in parameter order.
        base: name or absolute path of the base model, valid from any working directory.
        key: configuration key of the settings.
        base_digest: digest of the base weights; empty if this process holds only a slice of them.
        joined: {name of a module: [(name, rows of the weight matrix) of each of transformers' modules that it joins]},
            for modules such as qkv_proj with one adapter for several (`Adapters.joins`)."""

    section: str
    modules: tuple[str, ...]
    layers: LayerKinds
    settings: Adapters
    base: str
    folder: ModelFolder
    key: str
    base_digest: str = ""
    joined: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainedModelConfig, folder: ModelFolder, section: str) -> Self | None:
        """Return the LoRA adapters that `config`, the section `section` ("policy" or "value"), requests for the model
        `folder`; None if LoRA is disabled. Raise ValueError if it selects no matrix, or one that cannot be adapted."""
        wanted = config.lora
        if wanted is None:
            return None
        native = folder.native()
        layers = LayerKinds.of(ModelSizes.of(native), wanted.joins)
        modules, key = adapted_modules(wanted, layers), config.lora_key(section)
        if not modules:
            raise ValueError(f"{key}.{nothing_adapted(wanted, config.model_name, layers)}")
        joined = {} if native["fused_gate_up"] or native["fused_mlps"] else _joined(modules, parameter_shapes(native))
        name = findable_name(config.model_name)
        return cls(section, tuple(modules), layers, wanted, name, folder, key, joined=joined)

    @property
    def targets(self) -> list[str]:
        name_of = weight_files.name_reader(self.folder.config)
        return [name_of(f"{module}.weight") for module in self.modules]

    def slices(self, native: dict[str, Plain], ranks: Ranks) -> Slices:
        """Return the layouts of the flat buffers of the adapters' weights: of the whole model and of each
        tensor-parallel rank's slice. `native`: the arguments of the native `DecoderModel`."""
        count = ranks.tensor_size
        adapters = (native, self.settings.dim, self.targets)
        layouts = [C.ParameterLayout(*adapters, rank, count) for rank in range(count)]
        return Slices(ranks, layouts, C.ParameterLayout(*adapters))

    def begin(self, model: C.DecoderModel, seed: int, weights_path: str | Path | None, *, is_whole: bool) -> None:
        """Add adapters to a frozen model whose base weights are loaded. They are read from the checkpoint
        `weights_path`; None: they are new, and do not change the model's results. `is_whole`: this process holds all
        weights, not a slice."""
        if is_whole:  # the digest depends on the number of slices
            self.base_digest = f"{model.digest():016x}"
        lora = self.settings
        model.adapt(lora.dim, float(lora.alpha), self.targets, lora.merge, lora.use_rslora)
        self.draw(model, seed)
        if weights_path is not None:
            self.load(Path(weights_path), model)

    def draw(self, model: C.DecoderModel, seed: int) -> None:
        """Initialise a model's adapters: A is drawn from the seed, and B is 0."""
        generator = torch.Generator().manual_seed(_STREAM * (2 if self.folder.value_head else 1) + seed)
        specs = model.trained_layout.specs
        views = named_views(specs, model.masters)
        for spec in specs:
            if spec.name.endswith(weight_files.LORA_A):
                views[spec.name].copy_(own_part(spec, self._drawn(spec.whole, generator)))
            elif spec.name.endswith(weight_files.LORA_B):
                views[spec.name].zero_()
        model.masters_changed()

    def _drawn(self, shape: list[int], generator: torch.Generator) -> Tensor:
        columns = shape[1]
        if self.settings.lora_A_init == "xavier":
            return torch.randn(shape, generator=generator) * math.sqrt(2 / (self.settings.dim + columns))
        bound = 1 / math.sqrt(columns)  # kaiming_uniform_ with a = sqrt(5)
        return (2 * torch.rand(shape, generator=generator) - 1) * bound

    # ---- the folder

    def save(self, weights: Path, layout: C.ParameterLayout, masters: Tensor) -> None:
        """Write the adapter in PEFT's format below `weights`. `masters` has its float32 weights, unsliced."""
        folder = weights / weight_files.ADAPTER
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, view in named_views(layout.specs, masters).items():
            for key, part in self._parts(name, view):
                tensor = self._converted(lora_b_for_peft, name, part).contiguous()
                tensors[key] = (tensor.clone() if self.joined else tensor).cpu()  # modules share a joined adapter's A
        if is_fused(self.folder.config):
            tensors = joined_adapters(tensors, self.folder.config, self.settings.dim)
        if self._is_text_of_images:
            tensors = {
                weight_files.PREFIX + _among_images(name.removeprefix(weight_files.PREFIX)): tensor
                for name, tensor in tensors.items()
            }
        save_file(tensors, folder / weight_files.WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / weight_files.CONFIG_FILE).write_text(json.dumps(self.peft_config(), indent=2, sort_keys=True) + "\n")
        base = {"digest": self.base_digest}
        if (format := self.folder.quantization) is not None:  # base weights are not saved, so a reader needs the source
            base |= {"model_name": self.base, "seed": self.folder.seed, "quantization": format}
        (folder / weight_files.BASE_FILE).write_text(json.dumps(base) + "\n")

    def _parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in PEFT's file, tensor) for the adapter tensor `name`. If several of transformers' modules share
        the adapter, each gets its rows of B and the common A."""
        name = weight_files.name_writer(self.folder.config)(name)
        module, _, matrix = name.rpartition(".lora_")
        if module not in self.joined:
            yield weight_files.PREFIX + name, tensor
        begin = 0
        for part, rows in self.joined.get(module, ()):
            yield (
                f"{weight_files.PREFIX}{part}.lora_{matrix}",
                tensor.narrow(1, begin, rows) if name.endswith(weight_files.LORA_B) else tensor,
            )
            begin += rows

    @cached_property
    def _is_text_of_images(self) -> bool:
        """Return whether the base is a vision-language model that transformers loads with its vision tower, also as a
        causal language model. Of Qwen3.5 it loads the text model."""
        path = self.folder.path
        return path is not None and read_config_file(path).get("model_type") in _WITH_TOWERS

    @property
    def _peft_modules(self) -> list[str]:
        """Return the names of the adapted modules of transformers' model."""
        modules = map(weight_files.name_writer(self.folder.config), self.modules)
        return [part for module in modules for part, _ in self.joined.get(module, ((module, 0),))]

    def _converted(self, convert: Callable[[Tensor, int, bool], Tensor], name: str, tensor: Tensor) -> Tensor:
        if not name.endswith(weight_files.LORA_B):
            return tensor
        is_gpt_oss = self.folder.config["model_type"] == "gpt_oss"
        return convert(tensor, self.settings.dim, weight_files.alternates_in_peft(name, is_gpt_oss))

    def peft_config(self) -> dict[str, Plain]:
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.folder.value_head else "CAUSAL_LM",
            "base_model_name_or_path": None if self.base == TINY_RANDOM else published_name(self.base),
            "r": self.settings.dim,
            "lora_alpha": self.settings.alpha,
            "use_rslora": self.settings.use_rslora,
            "lora_dropout": 0.0,
            **self._peft_targets(),
            **self._peft_ranks(),
            "modules_to_save": ["score"] if self.folder.value_head else None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def _peft_targets(self) -> dict[str, list[str]]:
        """Return the entries of adapter_config.json that list what is adapted: target_modules (names of modules) and,
        for MLPs of a model with experts, target_parameters (names of weights). In target_modules, PEFT would read such
        an MLP's gate_proj, up_proj and down_proj as the experts' matrices, except in Nemotron-H and LFM2. Names are
        short, such as q_proj, if each is adapted in every layer that has it; otherwise they are full."""
        first = "gate_up_proj" if self.layers.mlps is None else "up_proj"

        def is_parameter(module: str) -> bool:
            return is_experts(module) or (bool(self.layers.experts) and ".mlp." in module)

        def short(module: str) -> str:
            return module.split(".", 3)[3] if is_parameter(module) else module.rpartition(".")[2]

        others = set(map(short, set(self.layers.modules()).difference(self.modules)))
        are_short = others.isdisjoint(map(short, self.modules))
        found: dict[str, list[str]] = {"target_modules": []}
        modules = self._peft_modules
        for module in dict.fromkeys(map(fused_module, modules)) if is_fused(self.folder.config) else modules:
            name = short(module) if are_short else module
            if self._is_text_of_images:  # the vision tower has modules with the same short names
                name = _among_images(module)
            if is_parameter(module):
                weights = (first, "down_proj") if is_experts(module) else ("weight",)
                found.setdefault("target_parameters", []).extend(f"{name}.{weight}" for weight in weights)
            else:
                found["target_modules"].append(name)
        return {key: list(dict.fromkeys(names)) for key, names in found.items()}

    def _peft_ranks(self) -> dict[str, Plain]:
        """Return the entries of adapter_config.json for fused projections, whose adapters have twice the rank `dim`."""
        names = {module.rpartition(".")[2] for module in self.modules} if is_fused(self.folder.config) else set()
        fused = [name for name, parts in PARTS.items() if not names.isdisjoint(parts)]
        if not fused:
            return {}
        alpha = self.settings.alpha * (math.sqrt(2) if self.settings.use_rslora else 2)  # the scale stays the same
        return {
            "rank_pattern": dict.fromkeys(fused, 2 * self.settings.dim),
            "alpha_pattern": dict.fromkeys(fused, alpha),
        }

    def load(self, weights: Path, model: C.DecoderModel) -> None:
        """Load an adapter that `save` wrote. Raise ValueError if it is missing or does not fit settings or base."""
        folder = weights / weight_files.ADAPTER
        if not (folder / weight_files.WEIGHTS_FILE).is_file():
            raise ValueError(
                f"{weights} holds no adapter, so a run saved it that trains all weights: set {self.key}.enabled=false, or name "
                f"it by {self.section}.model_name to begin adapters of it"
            )
        specs = model.trained_layout.specs
        views = named_views(specs, model.masters)
        saved = {
            weight_files.PREFIX + weight_files.name_in_text_model(name): t
            for name, t in load_file(folder / weight_files.WEIGHTS_FILE).items()
        }
        if is_fused(self.folder.config):
            saved = split_adapters(
                saved, self.folder.config, json.loads((folder / weight_files.CONFIG_FILE).read_text())["r"]
            )
        self._check_saved(folder, list(saved))
        for spec in specs:
            for name, part in self._parts(spec.name, views[spec.name]):
                part.copy_(own_part(spec, self._converted(lora_b_from_peft, spec.name, saved[name])))
        model.masters_changed()

    def _check_saved(self, folder: Path, names: list[str]) -> None:
        key = self.key
        saved = json.loads((folder / weight_files.CONFIG_FILE).read_text())
        before = {"dim": saved.get("r"), "alpha": saved.get("lora_alpha"), "use_rslora": saved.get("use_rslora", False)}
        for name, value in before.items():
            if (now := getattr(self.settings, name)) != value:
                raise ValueError(f"{key}.{name} is {now}, but the adapter in {folder} has {value}: set it back")
        modules = weight_files.adapted_modules_of(names)
        if set(modules) != set(self._peft_modules):
            raise ValueError(
                f"{key}.target_modules means {len(self._peft_modules)} matrices, the adapter in {folder} has {len(modules)}, and they are not the same: "
                "name those of the run that saved it"
            )
        digest = json.loads((folder / weight_files.BASE_FILE).read_text())["digest"]
        if digest and self.base_digest and digest != self.base_digest:
            raise ValueError(
                f"{self.section}.model_name is {self.base}, whose weights (digest {self.base_digest}) are not those that the adapter in {folder} is for "
                f"(digest {digest}): name the model of the run that saved it"
            )
