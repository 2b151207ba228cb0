"""The learning-rate schedule, and the results of a `train` call's optimizer steps, on one rank or on all."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl_cpp.config.optimizer import MegatronOptimizerConfig, MegatronSchedulerConfig, SchedulerStage
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.metrics import extremum
from nemo_rl_cpp.models.interfaces import TrainingResult
from nemo_rl_cpp.models.policy.train_step import GlobalBatchResult

Value = TypeVar("Value")


@dataclass
class Updates:
    """The results of one `train` call, with a list entry per global batch. `blocks` has the number of micro-batches of
    each gradient block (see `Ranks.blocks`); `losses` and `metrics` have an entry per micro-batch; `norms` are gradient
    norms. `in_turns`: gradient blocks were assigned to ranks round-robin."""

    in_turns: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[list[dict[str, float]]] = field(default_factory=list)
    packed_tokens: int = 0
    zero_gradient_tokens: int = 0

    def add(self, result: GlobalBatchResult, settings: dict[str, float]) -> None:
        """Append the result of one global batch. `settings` (`lr`, `wd`, `grad_norm`) are added to the metrics of each
        of its micro-batches."""
        self.blocks.append(result.blocks)
        self.losses.append(result.losses)
        self.metrics.append([metrics | settings for metrics in result.metrics])
        self.packed_tokens += result.packed_tokens
        self.zero_gradient_tokens += result.zero_gradient_tokens

    @classmethod
    def of_ranks(cls, parts: Sequence[Self]) -> Self:
        """Combine the results of all ranks into those of a single process, in the order of the gradient blocks."""
        return cls(
            losses=_in_block_order(parts, [part.losses for part in parts]),
            norms=parts[0].norms,
            metrics=_in_block_order(parts, [part.metrics for part in parts]),
            packed_tokens=sum(part.packed_tokens for part in parts),
            zero_gradient_tokens=sum(part.zero_gradient_tokens for part in parts),
        )

    def report(self) -> TrainingResult:
        return {
            "loss": torch.tensor([float(sum(losses)) for losses in self.losses]),
            "grad_norm": torch.tensor(self.norms if self.norms else [0.0]),
            "all_mb_metrics": collect_metrics(self.metrics),
            "packed_tokens": self.packed_tokens,
        }


def _in_block_order(parts: Sequence[Updates], of_ranks: Sequence[list[list[Value]]]) -> list[list[Value]]:
    """Return for each global batch the values of all ranks (`of_ranks[rank][batch]`, one per micro-batch) in the order
    of the gradient blocks."""
    joined: list[list[Value]] = []
    for number, lists in enumerate(zip(*of_ranks)):
        if not parts[0].in_turns:
            joined.append([value for values in lists for value in values])
            continue
        left = [iter(values) for values in lists]
        turns = zip(*(part.blocks[number] for part in parts))
        joined.append([value for counts in turns for rest, count in zip(left, counts) for value in islice(rest, count)])
    return joined


_OF_GLOBAL_BATCH = {"lr", "wd", "grad_norm", "global_valid_seqs", "global_valid_toks"}
_NUMERATOR = "token_mult_prob_error_sum"


def collect_metrics(global_batches: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Return {metric: list of values} over all micro-batches of all global batches of a `train` call. Micro-batches
    without a valid sample are skipped, and so are global batches that have no other micro-batches.

    Most metrics have one value per micro-batch, the metric divided by the number of global batches; minima and maxima
    are not divided. NeMo RL also counts global batches without a valid sample: if one of two is such, a ratio that is 1
    at every token becomes 0.5. Metrics of a global batch (`lr`, `wd`, `grad_norm`, the counts of valid samples and
    tokens, and `token_mult_prob_error_sum`, which is summed) have one value per global batch, so that their mean does
    not depend on the size of micro-batches."""
    collected: dict[str, list[float]] = {}
    valid = [[each for each in batch if each.get("num_valid_samples", 1) != 0] for batch in global_batches]
    number = sum(bool(kept) for kept in valid)
    for kept in valid:
        for name in dict.fromkeys(name for metrics in kept for name in metrics):
            values = [metrics[name] for metrics in kept if name in metrics]
            if name in _OF_GLOBAL_BATCH:
                values = values[:1]
            elif name == _NUMERATOR:
                values = [math.fsum(values)]
            elif extremum(name) is None:
                values = [value / number for value in values]
            collected.setdefault(name, []).extend(values)
    return collected


class _StandInOptimizer(torch.optim.Optimizer):
    """An optimizer that only holds the learning rate of a torch scheduler. It does not call Optimizer's constructor,
    which imports torch's compiler for seconds."""

    def __init__(self, lr: float):
        self.defaults = {"lr": lr}
        self.state = {}
        self.param_groups = [{"params": [], "lr": lr}]

    def step(self, closure: object = None) -> None:
        """Do nothing: the native core takes the optimizer step."""


class LearningRateSchedule:
    """The learning rate and weight decay of the next optimizer step; `step` is called once per `train()` call."""

    lr: float
    weight_decay: float

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> None:
        self._steps += 1

    def state_dict(self) -> dict[str, object]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Advance this new schedule to the step of `state`, which another schedule may have written: a changed
        configuration takes effect from the next step."""
        for _ in range(state["steps"] if "steps" in state else state["scheduler"]["last_epoch"]):
            self.step()


class TorchLearningRate(LearningRateSchedule):
    """A learning-rate schedule of torch.optim.lr_scheduler classes, which set the rate of a stand-in optimizer. Several
    follow each other at the steps `milestones` (SequentialLR). Without any, the rate is constant."""

    def __init__(self, lr: float, weight_decay: float, stages: Sequence[SchedulerStage] = ()):
        super().__init__()
        self._optimizer, self.weight_decay = _StandInOptimizer(lr), weight_decay
        schedulers = torch.optim.lr_scheduler
        parts = [
            getattr(schedulers, stage.name.rpartition(".")[2])(self._optimizer, **stage.kwargs)
            for stage in stages
            if stage.name is not None
        ]
        if not parts:
            parts = [schedulers.ConstantLR(self._optimizer, factor=1.0, total_iters=0)]
        self._scheduler: LRScheduler = parts[0]
        if len(parts) > 1:
            milestones = next(stage.milestones for stage in stages if stage.milestones is not None)
            self._scheduler = schedulers.SequentialLR(self._optimizer, schedulers=parts, milestones=milestones)

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        super().step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the order of these two steps
            self._optimizer.step()
            self._scheduler.step()


class MegatronLearningRate(LearningRateSchedule):
    """Megatron's learning-rate schedule: linear warm-up from `lr_warmup_init` to `max_lr`, then decay to `min_lr`.

    While n <= warmup, lr(n) = init + (max - init) n / warmup. Afterwards, with r = (n - warmup) / (decay - warmup),
    lr(n) = min + c (max - min), where c is 1 - r (linear) or (cos(pi r) + 1) / 2 (cosine); inverse-square-root gives
    max sqrt(warmup / n). Weight decay goes from its start to its end value over `total_steps`."""

    def __init__(
        self, optimizer: MegatronOptimizerConfig, schedule: MegatronSchedulerConfig, total_steps: int | None = None
    ) -> None:
        super().__init__()
        self._schedule, self._max_lr, self._min_lr = schedule, optimizer.lr, optimizer.min_lr
        self._decays = schedule.weight_decays(optimizer.weight_decay)
        self._decay_steps = schedule.lr_decay_iters or total_steps or max(1, schedule.lr_warmup_iters + 1)
        self._total_steps = total_steps or self._decay_steps

    @property
    def lr(self) -> float:
        s, n, most, least = self._schedule, self._steps, self._max_lr, self._min_lr
        if s.lr_warmup_iters > 0 and n <= s.lr_warmup_iters:
            return s.lr_warmup_init + (most - s.lr_warmup_init) * n / s.lr_warmup_iters
        if s.lr_decay_style == "constant":
            return most
        if n > self._decay_steps:
            return least
        if s.lr_decay_style == "inverse-square-root":
            warmup = max(s.lr_warmup_iters, 1)
            return max(least, most * math.sqrt(warmup) / math.sqrt(max(n, 1)))
        ratio = (n - s.lr_warmup_iters) / max(1, self._decay_steps - s.lr_warmup_iters)
        coefficient = 1.0 - ratio if s.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return least + coefficient * (most - least)

    @property
    def weight_decay(self) -> float:
        style, (start, end) = self._schedule.weight_decay_incr_style, self._decays
        if style == "constant":
            return end
        ratio = min(1.0, self._steps / self._total_steps)
        coefficient = ratio if style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return start + coefficient * (end - start)


def create_schedule(config: TrainedModelConfig, total_steps: int | None = None) -> LearningRateSchedule:
    """Return the learning-rate schedule of a `policy` or `value` section. `total_steps` is the length of the run."""
    megatron = config.megatron_cfg
    if megatron.enabled:
        return MegatronLearningRate(megatron.optimizer, megatron.scheduler, total_steps)
    optimizer = config.effective_optimizer()
    return TorchLearningRate(optimizer.lr, optimizer.weight_decay, config.scheduler or ())
