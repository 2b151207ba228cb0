"""Tensors of different sizes, one a sample, that a batch carries as one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PackedTensor:
    """One tensor (or None) a sample, joined along `dim_to_pack` only when a model asks for it.

    Training here takes text alone; the class exists so that batches of other data can be sliced, sharded and joined
    like any other (`BatchedDataDict` knows it).
    """

    def __init__(self, tensors: Tensor | Sequence[Tensor | None], dim_to_pack: int) -> None:
        """A single tensor counts as one sample. ValueError when there is no sample."""
        if isinstance(tensors, (list, tuple)):
            if not tensors:
                raise ValueError("a PackedTensor needs at least one sample; use None for a sample without content")
            self.tensors: list[Tensor | None] = list(tensors)
        elif isinstance(tensors, Tensor):
            self.tensors = [tensors]
        else:
            raise ValueError(f"a PackedTensor holds a tensor or a list of them, not {type(tensors).__name__}")
        self.dim_to_pack = dim_to_pack

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: slice) -> PackedTensor:
        if not isinstance(index, slice):
            raise TypeError("a PackedTensor is sliced by a range (packed[a:b]) or by packed.slice([indices])")
        return self.slice(list(range(*index.indices(len(self)))))

    def slice(self, indices: list[int] | Tensor) -> PackedTensor:
        """The samples at `indices`, in that order; no index gives one sample without content."""
        chosen = indices.tolist() if isinstance(indices, Tensor) else indices
        return PackedTensor([self.tensors[i] for i in chosen] or [None], self.dim_to_pack)

    def as_tensor(self, device: torch.device | str | None = None) -> Tensor | None:
        """All samples along `dim_to_pack`; None when none has content. Other dimensions must agree."""
        if device is not None:
            self.to(device)
        present = [tensor for tensor in self.tensors if tensor is not None]
        return torch.cat(present, dim=self.dim_to_pack) if present else None

    def to(self, device: torch.device | str) -> PackedTensor:
        """Moves every tensor, in place."""
        self.tensors = [None if tensor is None else tensor.to(device) for tensor in self.tensors]
        return self

    def repeat_interleave(self, num_repeats: int, *, share: bool = False) -> PackedTensor:
        """Every sample `num_repeats` times, side by side; clones unless `share`."""
        repeated = [
            tensor if tensor is None or share else tensor.clone() for tensor in self.tensors for _ in range(num_repeats)
        ]
        return PackedTensor(repeated, self.dim_to_pack)

    @classmethod
    def empty_like(cls, other: PackedTensor) -> PackedTensor:
        """As many samples as `other` has, none with content."""
        return cls([None] * len(other), other.dim_to_pack)

    @classmethod
    def concat(cls, packed: list[PackedTensor]) -> PackedTensor:
        """The samples of all, one after another. ValueError when they pack along different dimensions."""
        return cls([tensor for each in packed for tensor in each.tensors], _common_dim(packed))

    @classmethod
    def flattened_concat(cls, packed: list[PackedTensor]) -> PackedTensor:
        """Each becomes one sample: its own samples along `dim_to_pack`."""
        return cls([each.as_tensor() for each in packed], _common_dim(packed))


def _common_dim(packed: list[PackedTensor]) -> int:
    dims = {each.dim_to_pack for each in packed}
    if len(dims) != 1:
        raise ValueError(f"PackedTensors of different dim_to_pack cannot be joined: {sorted(dims)}")
    return dims.pop()
