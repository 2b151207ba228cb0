"""Optimizers and schedules of torch and Megatron, LoRA, and the backend sections `dtensor_cfg` and `megatron_cfg`.

The native trainer replaces both backends of NeMo RL. It reads optimizer, schedule, gradient clipping, activation
checkpointing and parallel sizes from the section of the enabled backend, and ignores the section's other keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, model_validator

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line

from .base import Count, NonNegative, Positive, Real, Section, key, section
from .errors import Report

if TYPE_CHECKING:
    from nemo_rl_cpp.models.model_sizes import ModelSizes

    from .policy import TrainedModelConfig


SCHEDULER_KWARGS: dict[str, dict[str, float | None]] = {  # arguments and defaults of torch; None: must be given
    "LinearLR": {"start_factor": 1.0 / 3, "end_factor": 1.0, "total_iters": 5},
    "ConstantLR": {"factor": 1.0 / 3, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
}


def _moment_dtype(value: object) -> str:
    if name := _SHORT.get(str(value).removeprefix("torch.")):
        return name
    raise ValueError(
        f"cannot be {in_a_line(value)}: AdamW keeps its moments in float32 or bfloat16; set it to one of them"
    )


def _float32(value: object) -> str:
    if _SHORT.get(str(value).removeprefix("torch.")) == "float32":
        return "float32"
    raise ValueError(f"cannot be {in_a_line(value)}: it is float32 here; set it to float32 or leave it out")


def _adamw(value: object) -> object:
    return "torch.optim.AdamW" if value == "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam" else value


_SHORT = {"float32": "float32", "fp32": "float32", "float": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
MomentDtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_moment_dtype)]
Float32 = Annotated[Literal["float32"], BeforeValidator(_float32)]


class OptimizerKwargs(Section):
    """The arguments of AdamW."""

    lr: NonNegative = key(5e-6, "Learning rate.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay.")
    betas: list[Real] = key(
        [0.9, 0.999], "Decay rates of the first and the second moment, each in [0, 1).", min_length=2, max_length=2
    )
    eps: NonNegative = key(1e-8, "Constant added to the square root of the second moment.")
    exp_avg_dtype: MomentDtype = key(
        "float32", "dtype of the first moment. bfloat16 takes 2 bytes per weight and is rounded stochastically."
    )
    exp_avg_sq_dtype: MomentDtype = key(
        "float32", "dtype of the second moment. bfloat16 takes 2 bytes per weight and is rounded stochastically."
    )


class OptimizerConfig(Section):
    """The optimizer and its arguments."""

    name: Annotated[Literal["torch.optim.AdamW"], BeforeValidator(_adamw)] = key(
        "torch.optim.AdamW",
        "Optimizer. AdamW is the only one. The name of Transformer Engine's FusedAdam is read as AdamW: it has the same "
        "formula.",
    )
    kwargs: OptimizerKwargs = key(None, "Arguments of the optimizer.", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_kwargs(cls, data: object) -> object:
        return {**data, "kwargs": {}} if isinstance(data, dict) and data.get("kwargs") is None else data


class SchedulerStage(Section):
    """An entry of the list `scheduler`: either a schedule, or the milestones at which the next schedules begin."""

    name: str | None = key(None, "torch.optim.lr_scheduler." + "|".join(SCHEDULER_KWARGS))
    kwargs: dict[str, object] = key({}, "Arguments of the schedule.")
    milestones: list[Count] | None = key(None, "Steps at which the next schedule of the list begins.")

    @model_validator(mode="after")
    def _check(self) -> SchedulerStage:
        if self.milestones is not None:
            if self.name is not None:
                raise ValueError("holds name and milestones; write two entries")
            if sorted(set(self.milestones)) != self.milestones:
                raise ValueError(f"milestones must grow, not {self.milestones}")
            return self
        prefix, _, short = (self.name or "").rpartition(".")
        if short not in SCHEDULER_KWARGS or prefix not in ("", "torch.optim.lr_scheduler"):
            names = ", ".join("torch.optim.lr_scheduler." + known for known in SCHEDULER_KWARGS)
            raise ValueError(f"needs a name out of {names} (or milestones), not {self.name!r}")
        defaults = SCHEDULER_KWARGS[short]
        for name, value in self.kwargs.items():
            if name not in defaults:
                raise ValueError(f"kwargs.{name} is unknown; {short} takes {', '.join(defaults)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"kwargs.{name} must be a number, not {value!r}")
        missing = [name for name, default in defaults.items() if default is None and name not in self.kwargs]
        if missing:
            raise ValueError(f"needs kwargs.{missing[0]}")
        if self.kwargs.get("T_max", 1) <= 0:
            raise ValueError(f"kwargs.T_max must be greater than 0 (steps until eta_min), not {self.kwargs['T_max']}")
        return self


class MegatronOptimizerConfig(Section):
    """Megatron's settings of the optimizer. Used if megatron_cfg.enabled is true."""

    optimizer: Literal["adam"] = key("adam", "Optimizer. adam (with decoupled weight decay) is the only one.")
    lr: NonNegative = key(5e-6, "Maximum learning rate.")
    min_lr: NonNegative = key(5e-7, "Learning rate at the end of the decay.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay.")
    adam_beta1: Real = key(0.9, "Decay rate of the first moment.", ge=0, lt=1)
    adam_beta2: Real = key(0.999, "Decay rate of the second moment.", ge=0, lt=1)
    adam_eps: NonNegative = key(1e-8, "Constant added to the square root of the second moment.")
    clip_grad: NonNegative | None = key(1.0, "Maximum global norm of the gradient. 0 or null: no clipping.")
    params_dtype: Literal["float32"] = key("float32", "The dtype of the optimizer's state is float32.")
    exp_avg_dtype: MomentDtype = key(
        "float32", "dtype of the first moment. bfloat16 takes 2 bytes per weight and is rounded stochastically."
    )
    exp_avg_sq_dtype: MomentDtype = key(
        "float32", "dtype of the second moment. bfloat16 takes 2 bytes per weight and is rounded stochastically."
    )
    main_grads_dtype: Float32 = key("float32", "dtype in which gradients are accumulated. Only float32 is supported.")
    main_params_dtype: Float32 = key("float32", "dtype of the master weights. Only float32 is supported.")


class MegatronSchedulerConfig(Section):
    """Megatron's schedule of learning rate and weight decay. Used if megatron_cfg.enabled is true."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = key(
        "constant", "Shape of the learning rate's decay after the warm-up."
    )
    lr_decay_iters: Positive | None = key(
        1000,
        "Step at which the learning rate reaches min_lr. null: the last step of the run (max_num_steps or "
        "max_num_epochs).",
    )
    lr_warmup_iters: Count = key(13, "Number of linear warm-up steps.")
    lr_warmup_init: NonNegative = key(5e-7, "Learning rate at the start of the warm-up.")
    start_weight_decay: NonNegative | None = key(None, "Weight decay at the start. null: optimizer.weight_decay.")
    end_weight_decay: NonNegative | None = key(None, "Weight decay at the end. null: optimizer.weight_decay.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key(
        "constant", "Shape of the change from start_weight_decay to end_weight_decay."
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of AdamW, independent of the section that they were read from."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    exp_avg_dtype: MomentDtype = "float32"
    exp_avg_sq_dtype: MomentDtype = "float32"

    @property
    def moment_bytes(self) -> float:
        """Bytes per weight of the two moments together."""
        return sum(2.0 if dtype == "bfloat16" else 4.0 for dtype in (self.exp_avg_dtype, self.exp_avg_sq_dtype))


@dataclass(frozen=True)
class TorchStage:
    """One stage of a learning-rate schedule. `name` is LinearLR, ConstantLR or CosineAnnealingLR; `kwargs` has all its
    arguments, including those with torch's defaults."""

    name: str
    kwargs: dict[str, float]


@dataclass(frozen=True)
class TorchSchedule:
    """A learning-rate schedule of several stages, like torch's SequentialLR: `stages[i + 1]` begins at step
    `milestones[i]`."""

    stages: tuple[TorchStage, ...]
    milestones: tuple[int, ...]


@dataclass(frozen=True)
class MegatronSchedule:
    """Megatron's schedule. The learning rate rises linearly from lr_warmup_init to max_lr, then decays to min_lr. The
    weight decay changes from start_weight_decay to end_weight_decay. `lr_decay_iters` None means the whole run.
    """

    max_lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_init: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str


def torch_optimizer(config: OptimizerConfig) -> OptimizerSettings:
    kwargs = config.kwargs
    return OptimizerSettings(
        kwargs.lr,
        kwargs.weight_decay,
        (kwargs.betas[0], kwargs.betas[1]),
        kwargs.eps,
        kwargs.exp_avg_dtype,
        kwargs.exp_avg_sq_dtype,
    )


def torch_schedule(stages: list[SchedulerStage] | None) -> TorchSchedule | None:
    """Return the schedule that the entries of `scheduler` describe; None for a constant learning rate."""
    if not stages:
        return None
    named = tuple(
        TorchStage(short, {**SCHEDULER_KWARGS[short], **stage.kwargs})
        for stage in stages
        if stage.name is not None
        for short in [stage.name.rpartition(".")[2]]
    )
    milestones = next((tuple(stage.milestones) for stage in stages if stage.milestones is not None), ())
    return TorchSchedule(named, milestones)


def megatron_optimizer(config: MegatronOptimizerConfig) -> OptimizerSettings:
    betas = (config.adam_beta1, config.adam_beta2)
    return OptimizerSettings(
        config.lr, config.weight_decay, betas, config.adam_eps, config.exp_avg_dtype, config.exp_avg_sq_dtype
    )


def megatron_schedule(optimizer: MegatronOptimizerConfig, scheduler: MegatronSchedulerConfig) -> MegatronSchedule:
    decay = optimizer.weight_decay
    return MegatronSchedule(
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_decay_style=scheduler.lr_decay_style,
        lr_decay_iters=scheduler.lr_decay_iters,
        lr_warmup_iters=scheduler.lr_warmup_iters,
        lr_warmup_init=scheduler.lr_warmup_init,
        start_weight_decay=decay if scheduler.start_weight_decay is None else scheduler.start_weight_decay,
        end_weight_decay=decay if scheduler.end_weight_decay is None else scheduler.end_weight_decay,
        weight_decay_incr_style=scheduler.weight_decay_incr_style,
    )


MATRICES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "qkv_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "gate_up_proj": "mlp",
    "down_proj": "mlp",
}
"""The matrices of a layer -> the module that contains them."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The fused matrices of Phi 3 -> the matrices that they replace."""
_SIDE_BY_SIDE = (
    ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("o_proj",), ("gate_proj", "up_proj"), ("gate_up_proj",), ("down_proj",),
)  # fmt: skip
"""Groups of matrices that a layer stores as one matrix (csrc/model/parameters.cpp)."""
FROZEN = ("lm_head", "model.embed_tokens", "score")
"""Matrices outside the layers. They never get adapters."""


class LoraConfig(Section):
    """LoRA: each adapted matrix gets two trained matrices, A [dim, in] and B [out, dim]. All weights are frozen."""

    is_switched = True
    enabled: bool = key(
        False,
        "Train low-rank adapters and freeze the weights. Memory: a few bytes per parameter instead of 18 to "
        "22. Used if dtensor_cfg.enabled is true. See docs/lora.md.",
    )
    target_modules: list[str] = key(
        [],
        "With match_all_linear false: matrices that get an adapter. q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj (qkv_proj and gate_up_proj in Phi 3), or names with wildcards such as "
        "`*.layers.0.*.q_proj`. []: all except exclude_modules.",
    )
    exclude_modules: list[str] = key(
        [],
        "With match_all_linear false, instead of target_modules: matrices that get no adapter. Names as in "
        "target_modules.",
    )
    match_all_linear: bool = key(
        True, "Give every matrix of every layer an adapter. The LM head and the embedding stay frozen in any case."
    )
    dim: Positive = key(8, "Rank of the adapters.")
    alpha: Positive = key(32, "Scale of the adapters: the product B A is multiplied by alpha / dim.")
    lora_A_init: Literal["xavier", "kaiming", "uniform"] = key(
        "xavier",
        "Distribution of the initial A: xavier (normal) or kaiming (uniform). uniform is NeMo RL's name for "
        "kaiming. B starts at 0.",
    )
    merge: bool = key(
        True,
        "true: compute the merged weights W + s B A after each step. false: compute s B (A x) + W x in each "
        "forward pass, so only one copy of W is needed, and no update is too small to be represented in "
        "policy.precision. With `quantization` the default is false.",
    )
    use_rslora: bool = key(False, "rsLoRA: multiply B A by alpha / sqrt(dim) instead of alpha / dim.")


def matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of `target_modules` matches the name of a module, such as
    model.layers.0.self_attn.q_proj. A pattern is the whole name, its end after a dot (q_proj), or the whole name with *
    as a wildcard for any text."""
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None


def module_of(layer: int, name: str) -> str:
    """Return the full module name of the matrix `name` (a key of MATRICES) in a layer."""
    return f"model.layers.{layer}.{MATRICES[name]}.{name}"


def modules_of_layers(layers: int, fused: bool = False) -> Iterator[str]:
    """Yield the name of every module that may have an adapter, in the order of the parameters. `fused`: the model has
    the fused matrices of Phi 3."""
    without = [name for parts in _FUSED.values() for name in parts] if fused else _FUSED
    for layer in range(layers):
        yield from (module_of(layer, name) for name in MATRICES if name not in without)


def adapted_modules(lora: LoraConfig, layers: int, fused: bool = False) -> list[str]:
    """Return the names of the modules that get adapters in a model with `layers` layers. `fused` as in
    `modules_of_layers`."""
    modules = list(modules_of_layers(layers, fused))
    everything, wanted, unwanted = lora.match_all_linear, lora.target_modules, lora.exclude_modules
    if everything or not (wanted or unwanted):
        return modules
    if wanted:
        return [module for module in modules if any(matches(pattern, module) for pattern in wanted)]
    return [module for module in modules if not any(matches(pattern, module) for pattern in unwanted)]


def nothing_adapted(lora: LoraConfig, model_name: str, layers: int) -> str:
    """Return the error message for LoRA settings that select no matrix of the model."""
    if lora.target_modules:
        why = f"target_modules is {lora.target_modules}, which no matrix of {model_name} with its {layers} layers is called"
    else:
        why = f"exclude_modules is {lora.exclude_modules}, which are all matrices of {model_name} with its {layers} layers"
    return f"{why}: name some of {', '.join(MATRICES)}"


def experts_adapted(lora: LoraConfig, modules: Iterable[str], model_name: str) -> str | None:
    """Return the error message for LoRA settings that select the MLP of a mixture-of-experts model, whose experts get
    no adapters; None if `modules`, the selected modules, contain no MLP."""
    wanted = next((module for module in modules if ".mlp." in module), None)
    if wanted is None:
        return None
    key = (
        "match_all_linear" if lora.match_all_linear else "target_modules" if lora.target_modules else "exclude_modules"
    )
    value = getattr(lora, key)
    return (
        f"{key} is {str(value).lower() if value is True else value}, which means {wanted} too, but {model_name} has experts, which get no "
        "adapters: set match_all_linear=false and target_modules=[q_proj,k_proj,v_proj,o_proj]"
    )


class AdapterSizes(NamedTuple):
    """Numbers of elements for a model with LoRA.

    Attributes:
        trained: elements of all matrices A and B.
        kept: elements of the stored matrices with adapters. With `merge`, a frozen copy of these matrices is kept.
    """

    trained: int
    kept: int


def adapter_sizes(lora: LoraConfig, sizes: ModelSizes) -> AdapterSizes:
    """Return the numbers of elements that LoRA adds to a model of these sizes."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, key_value = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    shapes = {
        "q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden), "o_proj": (hidden, query),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    shapes |= {name: (sum(shapes[part][0] for part in parts), hidden) for name, parts in _FUSED.items()}
    elements = {name: rows * columns for name, (rows, columns) in shapes.items()}
    modules = set(adapted_modules(lora, sizes.num_hidden_layers, sizes.fused_tensors))
    trained = sum(lora.dim * sum(shapes[module.rpartition(".")[2]]) for module in modules)
    kept = sum(
        sum(elements[name] for name in group)
        for layer in range(sizes.num_hidden_layers)
        for group in _SIDE_BY_SIDE
        if any(module_of(layer, name) in modules for name in group)
    )
    return AdapterSizes(trained, kept)


_MANY_LAYERS = 200  # more than any model has, to check patterns that name a layer
_ASKING = (
    "dim",
    "alpha",
    "target_modules",
    "exclude_modules",
    "use_rslora",
)  # keys whose values suggest that the user wants LoRA


def check_lora(model: TrainedModelConfig, name: str, report: Report) -> None:
    """Report mistakes in the LoRA settings of the model section `name` ("policy" or "value")."""
    lora, prefix = model.lora, f"{name}.dtensor_cfg.lora_cfg"
    if lora is None:
        if model.dtensor_cfg.lora_cfg.enabled:
            megatron = f"{name}.megatron_cfg.enabled"
            text = (
                f"is true, but needs {name}.dtensor_cfg.enabled=true and {megatron}=false: set them so, or this to "
                "false"
            )
            report.add(f"{prefix}.enabled", text, megatron)
        else:
            _check_unused(model.dtensor_cfg.lora_cfg, prefix, report)
        return
    if model.backend == "hf":
        text = f"is true, but the native core alone trains adapters: set {name}.backend=native, or enabled=false"
        report.add(f"{prefix}.enabled", text, f"{name}.backend")
    given = [listed for listed in ("target_modules", "exclude_modules") if getattr(lora, listed)]
    if lora.match_all_linear and given:
        every = f"{prefix}.match_all_linear"
        report.add(f"{prefix}.{given[0]}", f"names matrices, but match_all_linear is true: set {every}=false", every)
    elif len(given) == 2:
        text = "and target_modules are both given; give one of them"
        report.add(f"{prefix}.exclude_modules", text, f"{prefix}.target_modules")
    for listed in given:
        for pattern in getattr(lora, listed):
            if (fault := _fault(pattern, listed)) is not None:
                report.add(f"{prefix}.{listed}", fault)
    if not adapted_modules(lora, _MANY_LAYERS) and given == ["exclude_modules"]:
        report.add(f"{prefix}.exclude_modules", "leaves no matrix to adapt; name fewer")


def _check_unused(lora: LoraConfig, prefix: str, report: Report) -> None:
    """Report LoRA keys that are set although `enabled` is false, because all weights would be trained. They are allowed
    if `enabled: false` is set in the same place, or in one of higher precedence."""
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


def _fault(pattern: str, key: str) -> str | None:
    """Return the error message for a pattern of target_modules or exclude_modules; None if it matches a module."""
    if any(matches(pattern, module) for fused in (False, True) for module in modules_of_layers(_MANY_LAYERS, fused)):
        return None
    if any(matches(pattern, module) for module in FROZEN):
        return None if key == "exclude_modules" else f"names {pattern}: head and embedding stay frozen; leave it out"
    near = did_you_mean(pattern, MATRICES)
    return f"names {pattern}, which no matrix is called{near and f'; {near}'} (there are {', '.join(MATRICES)}; * stands for any text)"


_FOLDED = "Parallelism of the model. A run uses one device instead, with the same results (cluster.strict_sizes)."
_TENSOR = (
    "Number of tensor-parallel slices of each layer and of the vocabulary, with cluster.executor processes or ray; it must "
    "divide their number of processes. Otherwise a run uses one device, with the same results (cluster.strict_sizes)."
)


class DTensorConfig(Section):
    """NeMo RL's PyTorch backend. If it is enabled, the keys optimizer, scheduler and max_grad_norm of the section that
    contains it are used."""

    is_switched = True
    enabled: bool = key(True, "Use optimizer, scheduler and max_grad_norm of the section that contains dtensor_cfg.")
    activation_checkpointing: bool = key(
        False, "Recompute activations in the backward pass. This needs less memory and more time."
    )
    tensor_parallel_size: Positive = key(1, _TENSOR)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    lora_cfg: LoraConfig = section(LoraConfig, "LoRA: low-rank adapters instead of all weights")


class MegatronCheckpointConfig(Section):
    """Megatron's checkpoint format. The section is ignored."""


class PeftConfig(Section):
    """LoRA of the Megatron backend, which is not supported."""


class DDPConfig(Section):
    """Megatron's gradient reduction. Used if the Megatron backend is enabled. The keys `overlap_grad_reduce` and
    `data_parallel_sharding_strategy` of the model's section take precedence unless they are null."""

    overlap_grad_reduce: bool = key(
        True, "With several processes: reduce gradients during the backward pass. false: after it."
    )
    use_custom_fsdp: bool = key(
        False, "Use data_parallel_sharding_strategy of this section. false: the strategy is optim."
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = key(
        "optim_grads_params",
        "With use_custom_fsdp: what is sharded over the processes. no_shard and optim: optimizer state and "
        "master weights (ZeRO-1). optim_grads and optim_grads_params: gradients as well (ZeRO-2). Each "
        "process always has all weights.",
    )


class Fp8Config(Section):
    """FP8 training of Megatron, which is not supported."""


class MegatronConfig(Section):
    """NeMo RL's Megatron backend. If it is enabled, its own sections optimizer and scheduler are used."""

    is_switched = True
    enabled: bool = key(False, "Use the optimizer, scheduler and clip_grad of this section.")
    activation_checkpointing: bool = key(
        False, "Recompute activations in the backward pass. This needs less memory and more time."
    )
    tensor_model_parallel_size: Positive = key(1, _TENSOR)
    pipeline_model_parallel_size: Positive = key(1, _FOLDED)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_tensor_parallel_size: Positive = key(1, _FOLDED)
    expert_model_parallel_size: Positive = key(1, _FOLDED)
    optimizer: MegatronOptimizerConfig = section(MegatronOptimizerConfig, "optimizer")
    scheduler: MegatronSchedulerConfig = section(
        MegatronSchedulerConfig, "learning rate and weight decay over the steps"
    )
    checkpoint: MegatronCheckpointConfig = section(
        MegatronCheckpointConfig, "Megatron's checkpoint format, not used here"
    )
    peft: PeftConfig = section(PeftConfig, "Megatron's LoRA (not supported; see dtensor_cfg.lora_cfg)")
    distributed_data_parallel_config: DDPConfig = section(DDPConfig, "gradient exchange")
    fp8_cfg: Fp8Config | None = section(Fp8Config, "FP8 (not supported)")
    freeze_moe_router: bool = key(
        True,
        "Accepted without effect, because NeMo RL's files contain it. The router of a mixture-of-experts "
        "model is always trained; a notice reports this.",
    )


PARALLEL_SIZES = {
    "dtensor_cfg": ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
    "megatron_cfg": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
        "expert_model_parallel_size",
    ),
}
