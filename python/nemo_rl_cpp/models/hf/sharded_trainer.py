"""Gradients and optimizer steps of a model that is shared out among ranks: the ranks go through their micro-batches in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_rl_cpp.distributed.ranks import OtherRankFailedError, Ranks
from nemo_rl_cpp.models.hf.outputs import Outputs
from nemo_rl_cpp.models.hf.rows import ModelRows
from nemo_rl_cpp.models.hf.sharded_model import ShardedModel
from nemo_rl_cpp.models.hf.trainer import HfTrainer
from nemo_rl_cpp.models.policy.train_step import Scoring

if TYPE_CHECKING:
    from nemo_rl_cpp.models.hf.flat_model import FlatModel


class Wish(IntEnum):
    """What a rank is about to do. Of different wishes the largest comes first, and all ranks take part in it."""

    END = 0
    SCORE = 1
    FORWARD = 2
    FORWARD_AGAIN = 3
    """with activations that the backward computes again"""
    BACKWARD = 4
    FAIL = 5


class ShardedTrainer(HfTrainer):
    """As `HfTrainer`, whose model is a `ShardedModel`.

    A pass gathers weights of all ranks, and ranks have different numbers of micro-batches, some of which have no gradient. So a rank says
    before each pass what it wants, and takes part in what others want: in a forward pass with two tokens of its own that nobody reads, in a
    backward pass with a gradient of 0.
    """

    model: ShardedModel

    def __init__(self, model: ShardedModel | FlatModel, packed: bool, ranks: Ranks, chunk: int | None = None) -> None:
        super().__init__(model, packed, chunk)
        self._ranks = ranks

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a turn over this rank's micro-batches. It ends when all ranks are through with theirs, or by an error on each of them
        where one has failed."""
        try:
            yield
            self._agree(Wish.END)
        except OtherRankFailedError:
            raise
        except Exception:
            self._say(Wish.FAIL)
            raise

    def _say(self, wish: Wish) -> list[int]:
        """What all ranks want."""
        every = torch.empty(self._ranks.size, 1, dtype=torch.int64)
        self._ranks.communicator.all_gather(every, torch.tensor([int(wish)]), phase="agreeing on the next pass")
        return every.flatten().tolist()

    def _agree(self, wish: Wish) -> None:
        """Takes part in what comes before `wish`, until it is what all others take part in."""
        while True:
            first = Wish(max(self._say(wish)))
            if first == Wish.FAIL:
                raise OtherRankFailedError(f"rank {self._ranks.rank} stopped: another rank failed")
            if first == wish:
                return
            if first == Wish.BACKWARD:
                super().backward(torch.zeros(1 + int(self._kept[1].places.max())))
            else:
                keep = first > Wish.SCORE
                self._kept = None
                super()._pass(ModelRows.smallest(), Scoring(), keep, first == Wish.FORWARD_AGAIN, False)

    def _pass(self, rows: ModelRows, scoring: Scoring, keep: bool, checkpoint: bool, unfiltered: bool) -> Outputs:
        self._agree((Wish.FORWARD_AGAIN if checkpoint else Wish.FORWARD) if keep else Wish.SCORE)
        return super()._pass(rows, scoring, keep, checkpoint, unfiltered)

    def backward(self, d_out: Tensor, d_unfiltered: Tensor | None = None) -> None:
        self._agree(Wish.BACKWARD)
        super().backward(d_out, d_unfiltered)

    def zero_grad(self) -> None:
        """Begins a new sum of gradients."""
        self._kept = None
        self.model.forget()

    @property
    def shard(self) -> tuple[int, int]:
        """This rank's rows are all of its flat buffers."""
        return 0, self.model.flat_layout.total

    @property
    def grads(self) -> Tensor:
        """float32 [n] of this rank's rows, a copy."""
        return self.model.grads

    def grads_are_finite(self) -> bool:
        """Whether no gradient on any rank is infinite or NaN. All ranks call it."""
        return self._ranks.sum(0.0 if super().grads_are_finite() else 1.0) == 0

    def _squares(self, grads: Tensor) -> float:
        return self._ranks.sum(super()._squares(grads))

    def _both_moments(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            total = self.model.flat_layout.total
            self._moments = torch.zeros(total), torch.zeros(total)
        return self._moments
