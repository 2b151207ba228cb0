"""Samples of a batch as what a module of transformers takes: laid end to end in one row, or one below the other with padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_cpp.models.policy.micro_batches import RowBatch


@dataclass(frozen=True)
class ModelRows:
    """The input of one forward pass, and where the wanted tokens' outputs are in it. W tokens are wanted.

    A token is foretold by the one before it, so that a sample's last wanted token and what follows are not computed.

    Attributes:
        input_ids, position_ids: int64 [1, T'] packed, positions beginning anew with each sample; or [b, S'], padded on the right
            (no token sees what is behind it, so that padding changes nothing).
        row, column: int64 [W] the token before each wanted one, in `input_ids`.
        targets: int64 [W] the wanted tokens.
        places: int64 [W] where they stand among the tokens of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    places: Tensor

    @classmethod
    def of(cls, batch: RowBatch, rows: list[int], *, packed: bool) -> ModelRows:
        """Of the samples `rows`, each of which wants a token."""
        ids, starts = batch.data.tokens["input_ids"].to(torch.int64), batch.data.starts[torch.tensor(rows)]
        wanted = [batch.wanted_of(row).nonzero().flatten() for row in rows]
        lengths = torch.tensor([int(w[-1]) for w in wanted])
        counts = torch.tensor([len(w) for w in wanted])
        inside = torch.cat(wanted)
        sample = torch.arange(len(rows)).repeat_interleave(counts)
        places = starts[sample] + inside
        position = torch.arange(int(lengths.max()))[None].expand(len(rows), -1)
        used = position < lengths[:, None]
        if packed:
            at = (starts[:, None] + position)[used]
            offset = lengths.cumsum(0) - lengths
            return cls(
                ids[at][None],
                position[used][None],
                torch.zeros_like(places),
                offset[sample] + inside - 1,
                ids[places],
                places,
            )
        at = torch.where(used, starts[:, None] + position, starts[:, None])
        return cls(ids[at].masked_fill(~used, 0), position.contiguous(), sample, inside - 1, ids[places], places)

    @classmethod
    def smallest(cls) -> ModelRows:
        """The shortest pass that wants a token: two tokens of one sample."""
        ids, zero = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return cls(ids, torch.arange(2)[None], zero, zero, zero, zero)

    def to(self, device: str) -> ModelRows:
        """The parts that a module reads, on its device."""
        if device == "cpu":
            return self
        moved = (t.to(device) for t in (self.input_ids, self.position_ids, self.row, self.column, self.targets))
        return ModelRows(*moved, self.places)
