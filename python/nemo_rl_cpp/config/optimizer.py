"""Optimizers and schedules: torch's names (`policy.optimizer`, `policy.scheduler`) and Megatron's (`megatron_cfg`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from nemo_rl_cpp.argument_checks import in_a_line

from .base import Count, NonNegative, Positive, Real, Section, key

SCHEDULER_KWARGS: dict[str, dict[str, float | None]] = {  # torch's names and defaults; None: must be given
    "LinearLR": {"start_factor": 1.0 / 3, "end_factor": 1.0, "total_iters": 5},
    "ConstantLR": {"factor": 1.0 / 3, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": None, "eta_min": 0.0},
}


def _moment_dtype(value: object) -> str:
    name = str(value).removeprefix("torch.")
    if name in ("float32", "fp32", "float"):
        return "float32"
    raise ValueError(
        f"cannot be {in_a_line(value)}: AdamW's state is float32 here (8 bytes a weight); set it to float32 or leave it out, and "
        "expect the memory that --dry-run forecasts"
    )


MomentDtype = Annotated[Literal["float32"], BeforeValidator(_moment_dtype)]


class OptimizerKwargs(Section):
    """Arguments of AdamW."""

    lr: NonNegative = key(5e-6, "learning rate")
    weight_decay: NonNegative = key(0.01, "decoupled weight decay")
    betas: list[Real] = key(
        [0.9, 0.999], "decay of the first and second moment, each in [0, 1)", min_length=2, max_length=2
    )
    eps: NonNegative = key(1e-8, "added to the square root of the second moment")
    exp_avg_dtype: MomentDtype = key("float32", "the first moment is kept in float32; nothing else is supported")
    exp_avg_sq_dtype: MomentDtype = key("float32", "the second moment is kept in float32; nothing else is supported")


class OptimizerConfig(Section):
    """The optimizer by its torch name."""

    name: Literal["torch.optim.AdamW"] = key("torch.optim.AdamW", "AdamW with fp32 moments; the only one")
    kwargs: OptimizerKwargs = key(None, "arguments", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_kwargs(cls, data: object) -> object:
        return {**data, "kwargs": {}} if isinstance(data, dict) and data.get("kwargs") is None else data


class SchedulerStage(Section):
    """One entry of `scheduler`: a schedule, or the milestones at which the next one begins."""

    name: str | None = key(None, "torch.optim.lr_scheduler." + "|".join(SCHEDULER_KWARGS))
    kwargs: dict[str, object] = key({}, "arguments of the schedule")
    milestones: list[Count] | None = key(None, "steps at which the next schedule begins")

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
    """Megatron's optimizer settings; effective when megatron_cfg.enabled."""

    optimizer: Literal["adam"] = key("adam", "Adam with decoupled weight decay; the only one")
    lr: NonNegative = key(5e-6, "highest learning rate")
    min_lr: NonNegative = key(5e-7, "lowest learning rate after decay")
    weight_decay: NonNegative = key(0.01, "decoupled weight decay")
    adam_beta1: Real = key(0.9, "decay of the first moment", ge=0, lt=1)
    adam_beta2: Real = key(0.999, "decay of the second moment", ge=0, lt=1)
    adam_eps: NonNegative = key(1e-8, "added to the square root of the second moment")
    clip_grad: NonNegative | None = key(1.0, "bound of the gradient's global norm; 0 or null: none")
    params_dtype: Literal["float32"] = key("float32", "optimizer state is fp32")
    exp_avg_dtype: MomentDtype = key("float32", "the first moment is kept in float32; nothing else is supported")
    exp_avg_sq_dtype: MomentDtype = key("float32", "the second moment is kept in float32; nothing else is supported")
    main_grads_dtype: MomentDtype = key("float32", "gradients are summed in float32; nothing else is supported")
    main_params_dtype: MomentDtype = key("float32", "master weights are float32; nothing else is supported")


class MegatronSchedulerConfig(Section):
    """Megatron's schedule of learning rate and weight decay; effective when megatron_cfg.enabled."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = key(
        "constant", "shape of the decay after warm-up"
    )
    lr_decay_iters: Positive | None = key(
        1000, "steps until min_lr; null: the whole run, which max_num_steps or max_num_epochs ends"
    )
    lr_warmup_iters: Count = key(13, "steps of linear warm-up")
    lr_warmup_init: NonNegative = key(5e-7, "learning rate at the start of the warm-up")
    start_weight_decay: NonNegative | None = key(None, "weight decay at the start; null: optimizer.weight_decay")
    end_weight_decay: NonNegative | None = key(None, "weight decay at the end; null: optimizer.weight_decay")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key("constant", "how weight decay changes")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW's numbers, whichever section they come from."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class TorchStage:
    """`name` is LinearLR, ConstantLR or CosineAnnealingLR; `kwargs` is complete (torch's defaults filled in)."""

    name: str
    kwargs: dict[str, float]


@dataclass(frozen=True)
class TorchSchedule:
    """Stages one after another as in torch's SequentialLR: `stages[i + 1]` begins at `milestones[i]`."""

    stages: tuple[TorchStage, ...]
    milestones: tuple[int, ...]


@dataclass(frozen=True)
class MegatronSchedule:
    """Linear warm-up from lr_warmup_init to max_lr, then decay to min_lr; weight decay from start to end.

    `lr_decay_iters` None means the whole run.
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
    return OptimizerSettings(kwargs.lr, kwargs.weight_decay, (kwargs.betas[0], kwargs.betas[1]), kwargs.eps)


def torch_schedule(stages: list[SchedulerStage] | None) -> TorchSchedule | None:
    """The schedule, or None for a constant learning rate."""
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
    return OptimizerSettings(config.lr, config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)


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
