"""Optimizers and schedules of torch and Megatron, and the backend sections `dtensor_cfg` and `megatron_cfg`.

The native trainer replaces both backends of NeMo RL. It reads optimizer, schedule, gradient clipping, activation
checkpointing and parallel sizes from the section of the enabled backend, and ignores the section's other keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import DTYPES, Count, NonNegative, Positive, Real, Section, key, section
from .lora import LoraConfig, PeftConfig

SCHEDULER_KWARGS: dict[str, dict[str, float | None]] = {  # arguments and defaults of torch; None: must be given
    "LinearLR": {"start_factor": 1.0 / 3, "end_factor": 1.0, "total_iters": 5},
    "ConstantLR": {"factor": 1.0 / 3, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
}


def _full_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


_FUSED = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
MomentDtype = Annotated[Literal["float32", "bfloat16", "uint8"], BeforeValidator(_full_name)]
Float32 = Annotated[Literal["float32"], BeforeValidator(_full_name)]
Beta = Annotated[Real, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    """The base class of torch's and Megatron's sections of AdamW, with the keys that both have."""

    lr: NonNegative = key(5e-6, "Learning rate.")
    weight_decay: NonNegative = key(0.01, "Decoupled weight decay.")
    exp_avg_dtype: MomentDtype = "float32"
    """dtype of the first moment. bfloat16 takes 2 bytes per weight, uint8 (which exp_avg_sq_dtype must then have, too)
    takes 1. Both are rounded stochastically."""
    exp_avg_sq_dtype: MomentDtype = "float32"
    """dtype of the second moment. bfloat16 takes 2 bytes per weight, uint8 (which exp_avg_dtype must then have, too)
    takes 1. Both are rounded stochastically."""
    store_param_remainders: bool = False
    """Store only the 16 bits of a float32 master weight that its bfloat16 weight lacks: 2 bytes per weight less. For
    full training by the native backend in bfloat16; others have no such copies."""


class OptimizerKwargs(AdamWConfig):
    """Settings of AdamW, under the names of torch's arguments."""

    betas: list[Beta] = key(
        [0.9, 0.999], "Decay rates of the first and the second moment, each in [0, 1).", min_length=2, max_length=2
    )
    eps: NonNegative = key(1e-8, "Constant added to the square root of the second moment.")


class OptimizerConfig(Section):
    """Settings of the optimizer: its name and its arguments."""

    name: Annotated[
        Literal["torch.optim.AdamW"], BeforeValidator(lambda name: "torch.optim.AdamW" if name == _FUSED else name)
    ] = "torch.optim.AdamW"
    """Optimizer: AdamW. Transformer Engine's FusedAdam is read as AdamW, because its formula is the same."""
    kwargs: OptimizerKwargs = key(None, "Arguments of the optimizer.", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_kwargs(cls, data: object) -> object:
        return {**data, "kwargs": {}} if isinstance(data, dict) and data.get("kwargs") is None else data


class SchedulerStage(Section):
    """An entry of the list `scheduler`: either a schedule, or the milestones (step numbers) at which the following
    schedules begin."""

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
            above_0 = name in ("start_factor", "T_max")
            if value < 0 or (above_0 and value == 0) or (name.endswith("factor") and value > 1):
                bounds = f"{'greater than' if above_0 else 'at least'} 0{' and at most 1' * name.endswith('factor')}"
                raise ValueError(f"kwargs.{name} must be {bounds}, not {value:g}")
        missing = [name for name, default in defaults.items() if default is None and name not in self.kwargs]
        if missing:
            raise ValueError(f"needs kwargs.{missing[0]}")
        return self


class MegatronOptimizerConfig(AdamWConfig):
    """Megatron's settings of the optimizer. Used if megatron_cfg.enabled is true."""

    optimizer: Literal["adam"] = key("adam", "Optimizer. adam (with decoupled weight decay) is the only one.")
    lr: NonNegative = key(5e-6, "Maximum learning rate.")
    min_lr: NonNegative = key(5e-7, "Learning rate at the end of the decay.")
    adam_beta1: Beta = key(0.9, "Decay rate of the first moment.")
    adam_beta2: Beta = key(0.999, "Decay rate of the second moment.")
    adam_eps: NonNegative = key(1e-8, "Constant added to the square root of the second moment.")
    clip_grad: NonNegative | None = key(1.0, "Maximum global norm of the gradient. 0 or null: no clipping.")
    params_dtype: Literal["float32"] = key("float32", "The dtype of the optimizer's state is float32.")
    main_grads_dtype: Float32 = key("float32", "dtype in which gradients are accumulated. Only float32 is supported.")
    main_params_dtype: Float32 = key("float32", "dtype of the master weights. Only float32 is supported.")


class MegatronSchedulerConfig(Section):
    """Megatron's schedule of learning rate and weight decay. Used if megatron_cfg.enabled is true."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the learning rate's decay after the warm-up."""
    lr_decay_iters: Positive | None = 1000
    """Step at which the learning rate reaches min_lr. null: the run's last (by max_num_steps or max_num_epochs)."""
    lr_warmup_iters: Count = key(13, "Number of linear warm-up steps.")
    lr_warmup_init: NonNegative = key(5e-7, "Learning rate at the start of the warm-up.")
    start_weight_decay: NonNegative | None = key(None, "Weight decay at the start. null: optimizer.weight_decay.")
    end_weight_decay: NonNegative | None = key(None, "Weight decay at the end. null: optimizer.weight_decay.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from start_weight_decay to end_weight_decay."""

    def weight_decays(self, default: float) -> list[float]:
        """Return the weight decay at the start and at the end; `default` replaces null."""
        given = self.start_weight_decay, self.end_weight_decay
        return [default if decay is None else decay for decay in given]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of AdamW, whether they come from torch's or Megatron's section."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    exp_avg_dtype: MomentDtype = "float32"
    exp_avg_sq_dtype: MomentDtype = "float32"
    store_param_remainders: bool = False

    @property
    def master_bytes(self) -> float:
        """The number of bytes per weight that are kept in addition to its bfloat16 value."""
        return 2.0 if self.store_param_remainders else 4.0

    @property
    def moment_bytes(self) -> float:
        """The number of bytes per weight of AdamW's two moments together."""
        widths = {"float32": 4.0, "bfloat16": 2.0, "uint8": 1.0}
        return widths[self.exp_avg_dtype] + widths[self.exp_avg_sq_dtype]


_FOLDED = "Parallelism of the model. A run uses one device instead, with the same results (cluster.strict_sizes)."
_TENSOR = (
    "Number of tensor-parallel slices of each layer and of the vocabulary, with cluster.executor processes or ray; it must "
    "divide their number of processes. Otherwise a run uses one device, with the same results (cluster.strict_sizes)."
)


class DTensorConfig(Section):
    """Settings of NeMo RL's PyTorch backend. If this backend is enabled, the keys optimizer, scheduler and
    max_grad_norm of the section that contains `dtensor_cfg` are used."""

    is_switched = True
    enabled: bool = key(True, "Use optimizer, scheduler and max_grad_norm of the section that contains dtensor_cfg.")
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass. This needs less memory and more time."""
    tensor_parallel_size: Positive = key(1, _TENSOR)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_parallel_size: Positive = key(1, _FOLDED)
    lora_cfg: LoraConfig = section(LoraConfig)


class MegatronCheckpointConfig(Section):
    """Settings of Megatron's checkpoint format. The section is ignored."""


class DDPConfig(Section):
    """Settings of Megatron's gradient reduction, used if the Megatron backend is enabled. The keys
    `overlap_grad_reduce` and `data_parallel_sharding_strategy` of the section `policy` or `value` take precedence
    unless they are null."""

    overlap_grad_reduce: bool = True
    """With several processes: reduce gradients during the backward pass. false: after it."""
    use_custom_fsdp: bool = False
    """Use data_parallel_sharding_strategy of this section. false: the strategy is optim."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads_params"
    )
    """With use_custom_fsdp: what is sharded over the processes. no_shard and optim: optimizer state and master weights
    (ZeRO-1). optim_grads and optim_grads_params: gradients as well (ZeRO-2). Each process always has all weights."""


class Fp8Config(Section):
    """Settings of FP8 training of Megatron, which is not supported."""


class MegatronConfig(Section):
    """Settings of NeMo RL's Megatron backend. If it is enabled, its own sections optimizer and scheduler are used."""

    is_switched = True
    enabled: bool = key(False, "Use the optimizer, scheduler and clip_grad of this section.")
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass. This needs less memory and more time."""
    tensor_model_parallel_size: Positive = key(1, _TENSOR)
    pipeline_model_parallel_size: Positive = key(1, _FOLDED)
    context_parallel_size: Positive = key(1, _FOLDED)
    expert_tensor_parallel_size: Positive = key(1, _FOLDED)
    expert_model_parallel_size: Positive = key(1, _FOLDED)
    optimizer: MegatronOptimizerConfig = section(MegatronOptimizerConfig)
    scheduler: MegatronSchedulerConfig = section(MegatronSchedulerConfig)
    checkpoint: MegatronCheckpointConfig = section(MegatronCheckpointConfig)
    peft: PeftConfig = section(PeftConfig)
    distributed_data_parallel_config: DDPConfig = section(DDPConfig)
    fp8_cfg: Fp8Config | None = section(Fp8Config)
    moe_router_bias_update_rate: NonNegative = 0.0
    """Balances the experts of sigmoid routers without a loss (Wang et al., 2024): each optimizer step adds the rate to
    the bias of an expert that fewer tokens than the average chose, and subtracts it from the others. Shared prompts are
    then computed for each response, so that every token counts. 0: biases keep their values."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Loss that balances the experts of softmax routers (native backend). seq_aux_loss: Megatron's, over each sequence.
    aux_loss: the same, because results here do not depend on micro-batches, over which Megatron computes it. Shared
    prompts are then computed for each response. moe/load_balancing_loss reports it; 1 is balanced."""
    moe_aux_loss_coeff: NonNegative | None = None
    """Weight of the loss that moe_router_load_balancing_type selects: a mean over the sequences of a global batch,
    summed over the layers. null: router_aux_loss_coef of the model's config.json."""
    freeze_moe_router: bool = True
    """Freeze the weights of a mixture of experts' routers: no gradient and no weight decay. Used if
    megatron_cfg.enabled is true. The biases of sigmoid routers still follow moe_router_bias_update_rate."""
    mtp_num_layers: Count = 0
    """Accepted without effect if mtp_detach_heads is true, because NeMo RL's files contain it; otherwise only 0. Heads
    for multi-token prediction are not trained, and saved models do not have them; a notice reports this."""


PARALLEL_SIZES = {
    "dtensor_cfg": ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
    "megatron_cfg": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_tensor_parallel_size", "expert_model_parallel_size",
    ),
}  # fmt: skip
