"""Learning-rate schedules: torch's classes by name, or Megatron's warm-up and decay."""

import json
import math
import warnings

import torch
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl_cpp.config.optimizer import MegatronSchedule, TorchSchedule
from nemo_rl_cpp.config.policy import TrainedModelConfig


class _StandInOptimizer(torch.optim.Optimizer):
    """An optimizer that only holds the learning rate, which a scheduler sets. It skips the base constructor, because
    that imports torch's compiler, which takes seconds."""

    def __init__(self, lr: float):
        self.defaults = {"lr": lr}
        self.state = {}
        self.param_groups = [{"params": [], "lr": lr}]

    def step(self, closure: object = None) -> None:
        """Do nothing: the native core takes the optimizer step."""


class TorchLearningRate:
    """A schedule of torch.optim.lr_scheduler classes. They set the rate of a stand-in optimizer, so their values are
    torch's.

    Several scheduler classes follow each other at the steps `milestones` (SequentialLR). Without any class the rate is
    constant."""

    def __init__(self, lr: float, weight_decay: float, schedule: TorchSchedule | None):
        self._optimizer, self.weight_decay = _StandInOptimizer(lr), weight_decay
        stages = [[stage.name, dict(stage.kwargs)] for stage in schedule.stages] if schedule is not None else []
        milestones = list(schedule.milestones) if stages else []
        self._definition = _plain({"lr": lr, "stages": stages, "milestones": milestones})
        self._scheduler = self._build(schedule)

    def _build(self, schedule: TorchSchedule | None) -> LRScheduler:
        schedulers = torch.optim.lr_scheduler
        if schedule is None or not schedule.stages:
            return schedulers.ConstantLR(self._optimizer, factor=1.0, total_iters=0)
        stages = [getattr(schedulers, s.name.rsplit(".", 1)[-1])(self._optimizer, **s.kwargs) for s in schedule.stages]
        if len(stages) == 1:
            return stages[0]
        return schedulers.SequentialLR(self._optimizer, schedulers=stages, milestones=list(schedule.milestones))

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the order of these two steps
            self._optimizer.step()
            self._scheduler.step()

    def state_dict(self) -> dict[str, object]:
        scheduler = self._scheduler
        nested = [s.state_dict() for s in getattr(scheduler, "_schedulers", [])]
        own = {k: v for k, v in scheduler.state_dict().items() if k != "_schedulers"}
        return {
            "lr": self.lr, "initial_lr": self._optimizer.param_groups[0]["initial_lr"], "scheduler": _plain(own), "stages": _plain(nested),
            "definition": self._definition,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resume from `state`. If it belongs to a different schedule or initial learning rate, advance this schedule by
        the same number of steps, so that a changed configuration takes effect from the next step."""
        if not self._is_mine(state):
            for _ in range(steps_of(state)):
                self.step()
            return
        for scheduler, saved in zip(getattr(self._scheduler, "_schedulers", []), state["stages"], strict=True):
            scheduler.__dict__.update(saved)
        self._scheduler.__dict__.update(state["scheduler"])
        self._optimizer.param_groups[0]["lr"] = state["lr"]
        self._optimizer.param_groups[0]["initial_lr"] = state["initial_lr"]

    def _is_mine(self, state: dict[str, object]) -> bool:
        if "definition" in state:
            return state["definition"] == json.loads(json.dumps(self._definition))
        own = self.state_dict()  # an old state without a definition is compared by its contents
        return (
            state.get("initial_lr") == own["initial_lr"]
            and len(state.get("stages", [])) == len(own["stages"])
            and "scheduler" in state
        )


def steps_of(state: dict[str, object]) -> int:
    """Return the number of steps that the schedule with this `state_dict` has taken."""
    return int(state["steps"] if "steps" in state else state["scheduler"]["last_epoch"])


class MegatronLearningRate:
    """Megatron's scheduler: linear warm-up from `lr_warmup_init` to `max_lr`, then decay to `min_lr`.

    While n <= warmup, lr(n) = init + (max - init) n / warmup. Afterwards, with r = (n - warmup) / (decay - warmup),
    lr(n) = min + c (max - min), where c is 1 - r (linear) or (cos(pi r) + 1) / 2 (cosine); inverse-square-root gives
    max sqrt(warmup / n). Weight decay changes from its start to its end value over `total_steps`, regardless of the
    decay length."""

    def __init__(self, schedule: MegatronSchedule, total_steps: int | None = None):
        self._schedule = schedule
        self._decay_steps = schedule.lr_decay_iters or total_steps or max(1, schedule.lr_warmup_iters + 1)
        self._total_steps = total_steps or self._decay_steps
        self._steps = 0

    @property
    def lr(self) -> float:
        s, n = self._schedule, self._steps
        if s.lr_warmup_iters > 0 and n <= s.lr_warmup_iters:
            return s.lr_warmup_init + (s.max_lr - s.lr_warmup_init) * n / s.lr_warmup_iters
        if s.lr_decay_style == "constant":
            return s.max_lr
        if n > self._decay_steps:
            return s.min_lr
        if s.lr_decay_style == "inverse-square-root":
            warmup = max(s.lr_warmup_iters, 1)
            return max(s.min_lr, s.max_lr * math.sqrt(warmup) / math.sqrt(max(n, 1)))
        ratio = (n - s.lr_warmup_iters) / max(1, self._decay_steps - s.lr_warmup_iters)
        coefficient = 1.0 - ratio if s.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return s.min_lr + coefficient * (s.max_lr - s.min_lr)

    @property
    def weight_decay(self) -> float:
        s = self._schedule
        if s.weight_decay_incr_style == "constant":
            return s.end_weight_decay
        ratio = min(1.0, self._steps / self._total_steps)
        coefficient = ratio if s.weight_decay_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return s.start_weight_decay + coefficient * (s.end_weight_decay - s.start_weight_decay)

    def step(self) -> None:
        self._steps += 1

    def state_dict(self) -> dict[str, object]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._steps = steps_of(state)


LearningRateSchedule = TorchLearningRate | MegatronLearningRate
"""The learning rate and weight decay of the next optimizer step; `step` is called once per `train()` call."""


def create_schedule(config: TrainedModelConfig, total_steps: int | None = None) -> LearningRateSchedule:
    """Return the learning-rate schedule of a `policy` or `value` section. `total_steps` is the length of the run."""
    optimizer, schedule = config.effective_optimizer(), config.effective_scheduler()
    if isinstance(schedule, MegatronSchedule):
        return MegatronLearningRate(schedule, total_steps)
    return TorchLearningRate(optimizer.lr, optimizer.weight_decay, schedule)


def _plain(value: object) -> object:
    """Return a scheduler's state as JSON values (numbers, strings, lists, dictionaries); other values are dropped."""
    if isinstance(value, dict):
        kinds = int, float, str, bool, list, tuple, dict, type(None)
        return {k: _plain(v) for k, v in value.items() if isinstance(v, kinds)}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
