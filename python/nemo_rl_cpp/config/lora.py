"""LoRA: the settings in `lora_cfg`, and the matrices that they select in a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from nemo_rl_cpp.argument_checks import did_you_mean

from .base import Positive, Section, key
from .errors import Report

if TYPE_CHECKING:
    from nemo_rl_cpp.models.model_sizes import ModelSizes

    from .policy import TrainedModelConfig


_MATRICES_OF = {
    "self_attn": (
        "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj",
    ),
    "linear_attn": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj"),
    "mlp": ("experts", "shared_expert_gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
}  # fmt: skip
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection")  # Gemma 4's, in the layer itself
MATRICES = {name: module for module, names in _MATRICES_OF.items() for name in names} | dict.fromkeys(_PER_LAYER, "")
"""The matrices of a layer -> the module that contains them. A layer has either `self_attn` or, if it is recurrent,
`linear_attn`. In Nemotron-H these modules and `mlp` are called `mixer`, in LFM2 `linear_attn` is `conv` and `mlp` is
`feed_forward`. All experts of a layer are one module, as in NeMo AutoModel."""
_OF_AN_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")  # in a layer with experts those of the shared expert
OF_A_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LFM2 = {"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The matrices that have other names in LFM2 -> these names."""
_LFM2_BLOCKS = {"linear_attn": "conv", "mlp": "feed_forward"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The fused matrices of Phi 3, which share one adapter in Megatron's LoRA -> the matrices that they replace."""
MEGATRON = {
    "qkv_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_up_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "in_proj": "in_proj",
    "out_proj": "out_proj",
}
"""The matrices that Megatron's LoRA adapts -> their names in Megatron."""
MAMBA_OUTPUT = ".mixer.out_proj"
"""The end of the name of Mamba-2's output projection in Nemotron-H, which PEFT refuses to adapt."""
FROZEN = ("lm_head", "model.embed_tokens", "score")
"""Matrices outside the layers. They never get adapters."""


class Adapters(Section):
    """Settings of LoRA that both backends have."""

    is_switched = True
    joins: ClassVar[bool] = False
    """Whether q, k and v have one adapter together, and gate and up another."""
    enabled: bool = False
    """Train low-rank adapters and freeze the weights. Memory: a few bytes per parameter instead of 18 to 22. Used if
    dtensor_cfg.enabled is true. See docs/lora.md."""
    target_modules: list[str] = []
    """With match_all_linear false: matrices that get an adapter. q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj (qkv_proj and gate_up_proj in Phi 3, gate_up_proj in Granite 4 and GLM-4; q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj in latent
    attention; in_proj_qkv, in_proj_z, in_proj_b, in_proj_a and out_proj in recurrent layers, in_proj and out_proj in
    Mamba-2; in_proj, q_proj, k_proj, v_proj, out_proj, w1, w2 and w3 in LFM2; shared_expert_gate in Qwen2-MoE;
    per_layer_input_gate and per_layer_projection in Gemma 4), or names with wildcards such as `*.layers.0.*.q_proj`. In a layer with
    experts gate_proj, up_proj and down_proj are those of the shared expert, and experts are all experts. []: all except
    exclude_modules, experts, and out_proj of Nemotron-H."""
    exclude_modules: list[str] = []
    """With match_all_linear false and no target_modules: matrices without adapters, named as in target_modules."""
    dim: Positive = key(8, "Rank of the adapters.")
    alpha: Positive = key(32, "Scale of the adapters: the product B A is multiplied by alpha / dim.")
    merge: bool = True
    """true: compute the merged weights W + s B A after each step. false: compute s B (A x) + W x in each forward pass,
    which needs only one copy of W, and keeps updates that rounding W + s B A to policy.precision would lose. With
    `quantization` the default is false."""
    use_rslora: bool = key(False, "rsLoRA: multiply B A by alpha / sqrt(dim) instead of alpha / dim.")


class LoraConfig(Adapters):
    """Settings of LoRA: each adapted matrix gets two trained matrices, A [dim, in] and B [out, dim]. All weights of the
    base model are frozen."""

    match_all_linear: bool = True
    """Give every matrix of every layer an adapter, except those of experts and out_proj of Nemotron-H. The LM head and the
    embedding stay frozen in any case."""
    lora_A_init: Literal["xavier", "kaiming", "uniform"] = "xavier"
    """Distribution of the initial A: xavier (normal), or kaiming or uniform (both uniform). B starts at 0."""


class PeftConfig(Adapters):
    """Settings of LoRA in the Megatron backend: q, k and v have one adapter together, and so have gate and up. Matrices
    have Megatron's names."""

    joins = True
    match_all_linear: ClassVar[bool] = False
    enabled: bool = False
    """Train low-rank adapters and freeze the weights, if megatron_cfg.enabled is true. q, k and v have one A together,
    and so have gate and up. See docs/lora.md."""
    target_modules: list[str] = []
    """Matrices that get an adapter: linear_qkv, linear_proj, linear_fc1, linear_fc2, in Mamba-2 in_proj and out_proj,
    or names with wildcards such as `*.layers.0.*.linear_qkv`. []: all except exclude_modules, experts, and out_proj of
    Nemotron-H."""
    exclude_modules: list[str] = key([], "Instead of target_modules: matrices that get no adapter.")
    lora_A_init_method: Literal["xavier", "kaiming"] = key("xavier", "As lora_A_init of dtensor_cfg.lora_cfg.")

    lora_A_init = property(attrgetter("lora_A_init_method"))


def matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of `target_modules` (a whole name, its last parts such as q_proj, or with * for any
    text) matches the name of a module. It may begin with `backbone`, Nemotron-H's name for `model`."""
    pattern = re.sub(r"^backbone\.", "model.", pattern)
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None


def is_experts(module: str) -> bool:
    return module.endswith(".experts")


@dataclass(frozen=True)
class LayerKinds:
    """The properties of a model's layers that determine which matrices they have.

    Attributes:
        count: the number of layers.
        fused: whether the layers have fused matrices (qkv_proj, gate_up_proj) as in Phi 3, or joint adapters for them.
        fused_mlps: whether only the MLPs have a fused matrix (gate_up_proj), as in Granite 4 and GLM-4.
        recurrent: the indices of the recurrent layers.
        mamba: whether the recurrent layers have Mamba-2 instead of a gated delta net, as always with `mlps`.
        gated_conv: whether the recurrent layers have LFM2's short convolutions, and all matrices LFM2's names.
        latent: whether keys and values are computed from a shared low-dimensional vector (multi-head latent attention).
        latent_queries: whether queries are also computed from a low-dimensional vector.
        experts: the indices of the layers with experts. They have no MLP, but may have a shared expert.
        shared: the module name of the shared expert in these layers: shared_expert if it has a gate, otherwise
            shared_experts, or mlp in Gemma 4, where it does not lie in the module of the experts; empty: they have none.
        mlps: in Nemotron-H, whose layers have a mixer or an MLP (without a gate), the indices of the layers with an
            MLP or experts; None for other models, in which every layer has a mixer (such as attention) and an MLP.
        keyless: the indices of the layers that read the keys and values of an earlier layer (Gemma 4).
        valueless: the indices of the layers whose values are their keys.
        per_layer: whether the layers have per-layer inputs."""

    count: int
    fused: bool = False
    recurrent: Collection[int] = ()
    latent: bool = False
    latent_queries: bool = False
    experts: Collection[int] = ()
    shared: str = ""
    mlps: tuple[int, ...] | None = None
    fused_mlps: bool = False
    mamba: bool = False
    gated_conv: bool = False
    keyless: Collection[int] = ()
    valueless: Collection[int] = ()
    per_layer: bool = False

    @classmethod
    def of(cls, sizes: ModelSizes, joined: bool = False) -> Self:
        """Return the `LayerKinds` of a model. `joined` is whether the matrices q, k and v of a layer share one adapter,
        and gate and up another."""
        latent = sizes.kv_lora_rank > 0, sizes.q_lora_rank > 0
        shared = sizes.native["experts"]["shared"] if sizes.shared_expert_size else ""
        mlps = sizes.expert_layers, shared, sizes.mlp_layers or None
        fused, fused_mlps = sizes.native["fused_qkv"], sizes.native["fused_mlps"] or sizes.native["fused_gate_up"]
        recurrent = sizes.native.get("recurrent", {})
        own = fused_mlps and not fused, "step_limits" in recurrent, "gated_conv" in recurrent
        layers = [(layer, *own[3:]) for layer, own in enumerate(sizes.native.get("layer_sizes", ()))]
        keys = [layer for layer, _, source in layers if source >= 0], [layer for layer, is_key, _ in layers if is_key]
        return cls(
            sizes.num_hidden_layers,
            fused or joined,
            sizes.recurrent_layers,
            *latent,
            *mlps,
            *own,
            *keys,
            sizes.per_layer_inputs > 0,
        )

    def matrices(self, layer: int) -> Iterator[str]:
        """Yield the names (keys of MATRICES) of a layer's matrices that may have an adapter, in parameter order."""
        missing = {name for parts in FUSED.values() for name in parts} if self.fused else set(FUSED)
        if self.fused_mlps:
            missing = (missing - {"gate_up_proj"}) | {"gate_proj", "up_proj"}
        missing |= {"k_proj", "v_proj"} if self.latent else {"kv_a_proj_with_mqa", "kv_b_proj"}
        missing |= {"q_proj"} if self.latent_queries else {"q_a_proj", "q_b_proj"}
        missing |= {"k_proj", "v_proj"} if layer in self.keyless else {"v_proj"} if layer in self.valueless else set()
        has_experts = layer in self.experts
        missing |= set() if has_experts else {"experts"}
        is_gated = has_experts and self.shared == "shared_expert" and not self.fused
        missing |= set() if is_gated else {"shared_expert_gate"}
        missing |= set(_OF_AN_MLP) if has_experts and not self.shared else set()
        has_in_proj = self.mamba or self.gated_conv or self.mlps is not None
        missing |= set(OF_A_DELTA_NET) if has_in_proj else {"in_proj"}
        if self.mlps is not None:
            missing = (missing - {"up_proj"}) | {"gate_proj", "gate_up_proj"}
        mixer = "linear_attn" if layer in self.recurrent else "self_attn"
        blocks = (mixer, "mlp") if self.mlps is None else ("mlp" if layer in self.mlps else mixer,)
        blocks = (*blocks, "") if self.per_layer else blocks
        yield from (name for name, block in MATRICES.items() if block in blocks and name not in missing)

    def module(self, layer: int, name: str) -> str:
        """Return the full module name of the matrix `name` (a key of MATRICES) in a layer."""
        shared = f"{self.shared}." if layer in self.experts and name in _OF_AN_MLP else ""
        block = MATRICES[name] if self.mlps is None else "mixer"
        if self.shared == "mlp":
            block, shared = "" if name == "experts" else block, ""
        block = "mamba" if self.mamba and block == "linear_attn" else block
        if self.gated_conv:
            block, name = _LFM2_BLOCKS.get(block, block), LFM2.get(name, name)
        return f"model.layers.{layer}.{block}{'.' if block else ''}{shared}{name}"

    def modules(self) -> Iterator[str]:
        """Yield the full names of all modules that may have an adapter, in the order of the parameters."""
        for layer in range(self.count):
            yield from (self.module(layer, name) for name in self.matrices(layer))

    def names(self) -> list[str]:
        """Return the names of all matrices that may have an adapter, without layer numbers, each once."""
        return list(dict.fromkeys(module.rpartition(".")[2] for module in self.modules()))


def adapted_modules(lora: Adapters, layers: LayerKinds) -> list[str]:
    """Return the names of the modules that get adapters. Unless target_modules names them, experts get none, as in NeMo
    RL, and neither does `out_proj` of Nemotron-H, for which PEFT raises an error."""
    modules = list(layers.modules())
    everything, wanted, unwanted = lora.match_all_linear, lora.target_modules, lora.exclude_modules
    if wanted and not everything:
        return [module for module in modules if _matches_any(lora, wanted, module)]
    linear = [name for name in modules if not is_experts(name) and not name.endswith(MAMBA_OUTPUT)]
    return linear if everything else [module for module in linear if not _matches_any(lora, unwanted, module)]


def _matches_any(lora: Adapters, patterns: list[str], module: str) -> bool:
    """Return whether one of `patterns`, entries of target_modules or exclude_modules of `lora`, matches `module`."""
    if lora.joins:
        path, _, name = module.rpartition(".")
        module = f"{path}.{MEGATRON.get(name, name)}"
    return any(matches(pattern, module) for pattern in patterns)


def nothing_adapted(lora: Adapters, model_name: str, layers: LayerKinds) -> str:
    """Return the error message for LoRA settings that select no matrix of the model."""
    if lora.target_modules:
        why = f"target_modules is {lora.target_modules}, which no matrix of {model_name} with its {layers.count} layers is called"
    else:
        why = f"exclude_modules is {lora.exclude_modules}, which are all matrices of {model_name} with its {layers.count} layers"
    names = [MEGATRON.get(name, name) for name in layers.names()] if lora.joins else layers.names()
    return f"{why}: name some of {', '.join(names)}"


_MANY = 200  # more layers than any model has, to check patterns that name a layer
_JOINED, _JOINED_MAMBA = LayerKinds(_MANY, fused=True), LayerKinds(_MANY, fused=True, recurrent=range(_MANY), mlps=())
_ANY_MODEL = (
    LayerKinds(_MANY, per_layer=True), _JOINED, LayerKinds(_MANY, recurrent=range(_MANY)),
    LayerKinds(_MANY, latent=True), LayerKinds(_MANY, latent=True, latent_queries=True),
    *(LayerKinds(_MANY, experts=range(_MANY), shared=name) for name in ("shared_expert", "shared_experts", "mlp")),
    *(LayerKinds(_MANY, recurrent=layers, gated_conv=True) for layers in ((), range(_MANY))), LayerKinds(_MANY, experts=range(_MANY), gated_conv=True),
    *(LayerKinds(_MANY, recurrent=range(_MANY), mlps=mlps, mamba=True) for mlps in ((), None)), LayerKinds(_MANY, experts=range(_MANY), shared="shared_experts", mlps=tuple(range(_MANY))),
)  # fmt: skip
_ASKING = ("dim", "alpha", "target_modules", "exclude_modules", "use_rslora")  # the user then wants LoRA


def check_lora(model: TrainedModelConfig, name: str, report: Report) -> None:
    lora, prefix = model.lora, model.lora_key(name)
    if lora is None:
        prefix, megatron = f"{name}.dtensor_cfg.lora_cfg", f"{name}.megatron_cfg.enabled"
        if model.megatron_cfg.peft.enabled:
            text = f"needs {megatron}=true and {name}.dtensor_cfg.enabled=false: set them so, or this to false"
            report.add(f"{name}.megatron_cfg.peft.enabled", text, megatron)
        if model.dtensor_cfg.lora_cfg.enabled:
            text = f"needs {name}.dtensor_cfg.enabled=true and {megatron}=false: set them so, or this to false"
            report.add(f"{prefix}.enabled", text, megatron)
        else:
            _check_unused(model.dtensor_cfg.lora_cfg, prefix, report)
        return
    if model.backend == "hf":
        text = f"is true, but the native core alone trains adapters: set {name}.backend=native, or enabled=false"
        report.add(f"{prefix}.enabled", text, f"{name}.backend")
    if lora.joins and model.router_bias_update_rate:
        rate = f"{name}.megatron_cfg.moe_router_bias_update_rate"
        report.add(f"{prefix}.enabled", f"is true, but {rate} changes frozen biases of routers: set that to 0", rate)
    given = [listed for listed in ("target_modules", "exclude_modules") if getattr(lora, listed)]
    if lora.match_all_linear and given:
        every = f"{prefix}.match_all_linear"
        report.add(f"{prefix}.{given[0]}", f"names matrices, but match_all_linear is true: set {every}=false", every)
    elif len(given) == 2:
        text = "and target_modules are both given; give one of them"
        report.add(f"{prefix}.exclude_modules", text, f"{prefix}.target_modules")
    for listed in given:
        for pattern in getattr(lora, listed):
            if (fault := _fault(lora, pattern, listed)) is not None:
                report.add(f"{prefix}.{listed}", fault)
    if given == ["exclude_modules"] and not any(adapted_modules(lora, layers) for layers in _ANY_MODEL):
        report.add(f"{prefix}.exclude_modules", "leaves no matrix to adapt; name fewer")


def _check_unused(lora: LoraConfig, prefix: str, report: Report) -> None:
    """Report LoRA keys that have no effect because `enabled` is false, unless `enabled` is set in the same place as the
    key or in one of higher precedence (see `Report.nearness`)."""
    if report.has_problem(prefix):
        return
    for name in _ASKING:
        value, written = getattr(lora, name), report.nearness(f"{prefix}.{name}")
        is_asked = written > report.nearness(f"{prefix}.enabled") or "enabled" not in lora.model_fields_set
        if is_asked and value != type(lora).model_fields[name].get_default(call_default_factory=True):
            by_name = name.endswith("_modules") and lora.match_all_linear
            also = f" and {prefix}.match_all_linear=false" if by_name else ""
            text = f"is {value}, but all weights are trained: set {prefix}.enabled=true{also}, or leave this out"
            report.add(f"{prefix}.{name}", text)


def _fault(lora: Adapters, pattern: str, key: str) -> str | None:
    """Return an error message if `pattern`, an entry of `key`, matches no module that can have an adapter."""
    kinds = (_JOINED, _JOINED_MAMBA) if lora.joins else _ANY_MODEL
    if any(_matches_any(lora, [pattern], module) for layers in kinds for module in layers.modules()):
        return None
    if any(matches(pattern, module) for module in FROZEN):
        return None if key == "exclude_modules" else f"names {pattern}: head and embedding stay frozen; leave it out"
    names = list(dict.fromkeys(MEGATRON.values() if lora.joins else (*MATRICES, *LFM2.values())))
    near = did_you_mean(pattern, names)
    return f"names {pattern}, which no matrix is called{near and f'; {near}'} (there are {', '.join(names)}; * stands for any text)"
