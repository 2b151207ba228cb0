"""The results of the optimizer steps of one `train` call, on one rank or combined over all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self, TypeVar

import torch

from nemo_rl_cpp.metrics import extremum
from nemo_rl_cpp.models.interfaces import TrainingResult
from nemo_rl_cpp.models.policy.train_step import GlobalBatchResult

Value = TypeVar("Value")


@dataclass
class Updates:
    """The results of the global batches of one `train` call.

    Attributes:
        in_turns: whether gradient blocks were assigned to ranks round-robin.
        blocks: for each global batch, the number of micro-batches of each gradient block."""

    in_turns: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[list[dict[str, float]]] = field(default_factory=list)
    packed_tokens: int = 0
    zero_gradient_tokens: int = 0

    def add(self, result: GlobalBatchResult, settings: dict[str, float]) -> None:
        """Append the result of one global batch; `settings` (`lr`, `wd`) are added to its metrics."""
        self.blocks.append(result.blocks)
        self.losses.append(result.losses)
        self.metrics.append([metrics | settings for metrics in result.metrics])
        self.packed_tokens += result.packed_tokens
        self.zero_gradient_tokens += result.zero_gradient_tokens

    @classmethod
    def of_ranks(cls, parts: Sequence[Self]) -> Self:
        """Combine the results of all ranks in the order of the gradient blocks, as a single process would return
        them."""
        return cls(
            losses=_in_block_order(parts, [part.losses for part in parts]),
            norms=parts[0].norms,
            metrics=_in_block_order(parts, [part.metrics for part in parts]),
            packed_tokens=sum(part.packed_tokens for part in parts),
            zero_gradient_tokens=sum(part.zero_gradient_tokens for part in parts),
        )

    def report(self) -> TrainingResult:
        """Return these results in the form in which `train` returns them."""
        return {
            "loss": torch.tensor([float(sum(losses)) for losses in self.losses]),
            "grad_norm": torch.tensor(self.norms if self.norms else [0.0]),
            "all_mb_metrics": collect_metrics(self.metrics),
            "packed_tokens": self.packed_tokens,
        }


def _in_block_order(parts: Sequence[Updates], of_ranks: Sequence[list[list[Value]]]) -> list[list[Value]]:
    """Return one list per global batch with the values of all ranks' micro-batches, in the order of the gradient
    blocks."""
    joined: list[list[Value]] = []
    for number, lists in enumerate(zip(*of_ranks)):
        if not parts[0].in_turns:
            joined.append([value for values in lists for value in values])
            continue
        left = [iter(values) for values in lists]
        turns = zip(*(part.blocks[number] for part in parts))
        joined.append([value for counts in turns for rest, count in zip(left, counts) for value in islice(rest, count)])
    return joined


_OF_GLOBAL_BATCH = {"lr", "wd", "global_valid_seqs", "global_valid_toks"}
_NUMERATOR = "token_mult_prob_error_sum"


def collect_metrics(global_batches: list[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Return metric name -> list of values over all micro-batches of all global batches. Micro-batches without a valid
    sample are skipped.

    A metric that is a fraction has one value per micro-batch, divided by the number of global batches as in NeMo RL;
    minima and maxima are not divided. Metrics of a global batch (`lr`, `wd`, the counts of valid samples and tokens,
    and `token_mult_prob_error_sum`, which is summed) have one value per global batch, so that their mean does not
    depend on the size of micro-batches.
    """
    collected: dict[str, list[float]] = {}
    for micro_batches in global_batches:
        kept = [metrics for metrics in micro_batches if metrics.get("num_valid_samples", 1) != 0]
        for name in dict.fromkeys(name for metrics in kept for name in metrics):
            values = [metrics[name] for metrics in kept if name in metrics]
            if name in _OF_GLOBAL_BATCH:
                values = values[:1]
            elif name == _NUMERATOR:
                values = [math.fsum(values)]
            elif extremum(name) is None:
                values = [value / len(global_batches) for value in values]
            collected.setdefault(name, []).extend(values)
    return collected
