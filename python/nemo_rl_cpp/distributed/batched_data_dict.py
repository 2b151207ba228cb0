"""A batch as a dictionary: each value is a tensor with the batch as dimension 0, or a list with one item per row."""

from collections import UserDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Generic, Self, TypeVar

import torch

DictT = TypeVar("DictT", bound=Mapping[str, object])


class BatchedDataDict(UserDict, Generic[DictT]):
    """A dictionary of rows. Slicing, repeating and joining apply to all its values."""

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, object]], pad_value_dict: dict[str, int | float] | None = None
    ) -> Self:
        """Concatenate the rows of batches; the result's keys are sorted.

        Lists and 1-D tensors are concatenated. Tensors with more dimensions are first padded on the right of dimension
        1 to the longest, with `pad_value_dict[key]` (default 0). Batches without keys are skipped. A key may be missing
        from a batch without rows.

        Raise KeyError if a key is missing from a batch with rows.
        """
        pad_values = pad_value_dict or {}
        filled = [batch for batch in batches if len(batch) > 0]
        joined = cls()
        for key in sorted({key for batch in filled for key in batch}):
            values = []
            for i, batch in enumerate(filled):
                if key in batch:
                    values.append(batch[key])
                elif any(rows_of(value) for value in batch.values()):
                    raise KeyError(f"batch {i} of {len(filled)} has no key '{key}', which others have: {sorted(batch)}")
            joined[key] = cls._join(key, values, pad_values.get(key, 0))
        return joined

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times, with its copies adjacent. Items of lists are deep-copied."""
        repeated = type(self)()
        for key, value in self.data.items():
            if torch.is_tensor(value):
                repeated[key] = value.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [
                    item if item is None or isinstance(item, (str, int, float)) else deepcopy(item)
                    for item in value
                    for _ in range(num_repeats)
                ]
        return repeated

    def select_indices(self, indices: list[int] | torch.Tensor) -> Self:
        """Return the rows at `indices` in that order: a list, an integer tensor, or a bool tensor [B] used as a
        mask."""
        index = torch.as_tensor(indices)
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
        selected = type(self)()
        for key, value in self.data.items():
            if torch.is_tensor(value):
                selected[key] = value.index_select(0, index.to(value.device))
            else:
                selected[key] = [value[i] for i in index.tolist()]
        return selected

    def slice(self, start: int, end: int) -> Self:
        """Return the rows [start, end). Tensors share storage with this batch.

        Raise ValueError if `end` exceeds a tensor's rows.
        """
        sliced = type(self)()
        for key, value in self.data.items():
            if torch.is_tensor(value) and end > value.shape[0]:
                raise ValueError(f"rows [{start}, {end}) were asked of '{key}', which has {value.shape[0]} rows")
            sliced[key] = value[start:end]
        return sliced

    @property
    def size(self) -> int:
        """The number of rows, which is that of the first key's value, or 0 without keys."""
        return rows_of(next(iter(self.data.values()))) if self.data else 0

    @classmethod
    def _join(cls, key: str, values: list[object], pad_value: int | float) -> torch.Tensor | list[object]:
        if all(isinstance(value, (list, tuple)) for value in values):
            return [item for value in values for item in value]
        if not all(torch.is_tensor(value) for value in values):
            kinds = sorted({type(value).__name__ for value in values})
            raise NotImplementedError(
                f"'{key}' holds {kinds}: only tensors can be joined with tensors, lists with lists"
            )
        if values[0].dim() <= 1:
            return torch.cat(values)
        width = max(value.shape[1] for value in values)
        right = [(0, 0) * (value.dim() - 2) + (0, width - value.shape[1]) for value in values]
        return torch.cat([torch.nn.functional.pad(value, pad, value=pad_value) for value, pad in zip(values, right)])


def rows_of(value: torch.Tensor | Sequence[object]) -> int:
    """Return the number of rows in one value of a batch."""
    return value.shape[0] if torch.is_tensor(value) else len(value)
