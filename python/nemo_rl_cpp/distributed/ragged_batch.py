"""A batch without padding, whose samples' tokens are concatenated; and a padded batch, as a mapping."""

from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

TOKENS = "input_ids"
LENGTHS = "input_lengths"


class RaggedBatch(MutableMapping[str, Any]):
    """A batch of B samples with T tokens in total. Per-token tensors have T entries, of which sample b has [offsets[b],
    offsets[b + 1]).

    As a mapping it has NeMo RL's padded layout, which losses, estimators and adapters use: per-token `batch[name]` is
    [B, S], padded on the right with zeros (`input_ids` with the pad token), and `input_lengths` is int32 [B]. A padded
    tensor is a copy: to change the batch, set `batch[name] = tensor`.

    Args:
        offsets: int64 [B + 1], from 0 to T.
        tokens: name -> [T, ...]; includes `input_ids`.
        samples: name -> [B, ...], a list with one item per sample, or a value for the whole batch.
        width: S, the width of padded tensors, at least the length of the longest sample."""

    def __init__(
        self, offsets: Tensor, tokens: dict[str, Tensor], samples: dict[str, object], *, pad_token_id: int | None = 0,
        width: int = 0,
    ) -> None:  # fmt: skip
        self.offsets = offsets
        self.tokens = tokens
        self.samples = samples
        self.pad_token_id = pad_token_id or 0
        self.width = max(width, int(self.lengths.max()) if self.size else 0)

    @classmethod
    def of(cls, data: "Batch") -> Self:
        """Convert a batch from NeMo RL's layout: `input_ids` [B, S], `input_lengths` [B]; other tensors are per-token
        if their second dimension is S. Move tensors to the CPU. Raise ValueError if shapes and lengths do not fit."""
        if isinstance(data, RaggedBatch):
            return data
        ids, lengths = data[TOKENS], torch.as_tensor(data[LENGTHS]).to("cpu", torch.int64)
        if ids.dim() != 2 or lengths.shape != ids.shape[:1]:
            raise ValueError(
                f"a batch needs input_ids [B, S] and input_lengths [B], got {tuple(ids.shape)} and {tuple(lengths.shape)}"
            )
        if len(lengths) and not (1 <= int(lengths.min()) and int(lengths.max()) <= ids.shape[1]):
            raise ValueError(
                f"input_lengths go from {int(lengths.min())} to {int(lengths.max())}; expected 1 to {ids.shape[1]}, the width of input_ids"
            )
        made = cls(offsets_of(lengths), {}, {}, width=ids.shape[1])
        for name, value in data.items():
            if name != LENGTHS:
                made[name] = value.cpu() if isinstance(value, Tensor) else value
        return made

    def copy(self) -> Self:
        """Return a copy that shares the tensors, but to which tensors can be added without changing this batch."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, tokens=dict(self.tokens), samples=dict(self.samples))
        return made

    # ---- ragged

    @property
    def size(self) -> int:
        """The number of samples, B."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> Tensor:
        """The number of tokens of each sample, int64 [B]."""
        return self.offsets.diff()

    @cached_property
    def sample_of_token(self) -> Tensor:
        """The index of each token's sample, int64 [T]."""
        return torch.arange(self.size).repeat_interleave(self.lengths)

    @property
    def starts(self) -> Tensor:
        """The index of each sample's first token, int64 [B]."""
        return self.offsets[:-1].contiguous()

    def by_token(self, of_samples: Tensor) -> Tensor:
        """Expand a tensor [B] to [T]: each token gets the value of its sample."""
        return of_samples[self.sample_of_token]

    def by_sample(self, of_tokens: Tensor) -> Tensor:
        """Sum a tensor [T] over the tokens of each sample; return [B]."""
        return of_tokens.new_zeros(self.size).index_add_(0, self.sample_of_token, of_tokens)

    def rows(self, of_tokens: Tensor) -> Sequence[Tensor]:
        """Split a tensor [T, ...] with values of the tokens into one view per sample."""
        return of_tokens.split(self.lengths.tolist())

    def of_samples(self, value: object, rows: list[int]) -> object:
        """Return the entries of the samples `rows` if `value` is a tensor [B, ...] or a list; otherwise return
        `value`."""
        if isinstance(value, Tensor) and value.dim() and len(value) == self.size:
            return value[torch.tensor(rows, dtype=torch.int64)]
        if isinstance(value, list) and len(value) == self.size:
            return [value[row] for row in rows]
        return value

    # ---- padded

    @cached_property
    def _inside(self) -> Tensor:
        """Return bool [B, S]: whether each position of the padded layout holds a token."""
        return torch.arange(self.width)[None] < self.lengths[:, None]

    def padded(self, of_tokens: Tensor, fill: float = 0) -> Tensor:
        """Return `of_tokens` [T, ...], values of all tokens, as [B, S, ...]: one row per sample, padded with `fill`."""
        out = of_tokens.new_full((self.size, self.width, *of_tokens.shape[1:]), fill)
        out[self._inside] = of_tokens
        return out

    def ragged(self, value: Tensor) -> Tensor:
        """Remove the padding of a tensor [B, S, ...]; return [T, ...]. S is at least the longest sample's length. A
        tensor [T] is returned unchanged. In a tensor [B] or [B, 1] each value is repeated for its sample's tokens."""
        if value.dim() >= 2 and len(value) == self.size and value.shape[1] >= int(self.lengths.max()):
            width = min(value.shape[1], self.width)
            return value[:, :width][self._inside[:, :width]]
        if value.dim() == 1 and len(value) == self.num_tokens:
            return value
        if tuple(value.shape) in ((self.size,), (self.size, 1)):
            return self.by_token(value.reshape(-1))
        raise ValueError(
            f"a tensor of shape {tuple(value.shape)} does not belong to the {self.num_tokens} tokens of this batch, padded "
            f"[{self.size}, {self.width}]"
        )

    def places(self, samples: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return (indices int64 [b, width], mask bool [b, width]) of the samples [b], padded to `width`: each
        position's index among the T tokens (0 in the padding), and whether the position holds a token."""
        column = torch.arange(width)[None]
        inside = column < self.lengths[samples][:, None]
        return torch.where(inside, self.offsets[samples][:, None] + column, 0), inside

    # ---- as a mapping of padded tensors

    def __getitem__(self, name: str) -> Any:
        if name == LENGTHS:
            return self.lengths.int()
        if name in self.tokens:
            return self.padded(self.tokens[name], self.pad_token_id if name == TOKENS else 0)
        return self.samples[name]

    def __setitem__(self, name: str, value: object) -> None:
        if name == LENGTHS:
            raise KeyError("the lengths of a batch are not changed: make another batch")
        of_tokens = isinstance(value, Tensor) and (
            (value.dim() >= 2 and tuple(value.shape[:2]) == (self.size, self.width))
            or (value.dim() == 1 and len(value) == self.num_tokens != self.size)
        )
        if of_tokens:
            self.samples.pop(name, None)
            self.tokens[name] = self.ragged(value)
        else:
            self.tokens.pop(name, None)
            self.samples[name] = value

    def __delitem__(self, name: str) -> None:
        del (self.tokens if name in self.tokens else self.samples)[name]

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*self.tokens, *self.samples))
        yield from (TOKENS, LENGTHS)
        yield from (name for name in names if name != TOKENS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name == LENGTHS or name in self.tokens or name in self.samples

    __hash__ = object.__hash__  # two batches are equal only if they are the same object
    __eq__ = object.__eq__


Batch = Mapping[str, object] | RaggedBatch
"""The input of models: padded tensors under NeMo RL's names, or a batch without padding."""


def offsets_of(lengths: Tensor) -> Tensor:
    """Return offsets, int64 [B + 1], from `lengths` [B]: each sample's first token, then the number of tokens."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.to(torch.int64).cumsum(0)])


DictT = TypeVar("DictT", bound=Mapping[str, object])


class BatchedDataDict(UserDict, Generic[DictT]):
    """A dictionary of columns with equally many rows. Slicing, repeating and joining apply to all columns."""

    @classmethod
    def from_batches(cls, batches: Sequence[Mapping[str, object]]) -> Self:
        """Concatenate the rows of batches, which have the same keys, each for tensors or for lists."""
        joined = cls()
        for key in sorted({key for batch in batches for key in batch}):
            values = [batch[key] for batch in batches]
            is_tensor = torch.is_tensor(values[0])
            joined[key] = torch.cat(values) if is_tensor else [item for value in values for item in value]
        return joined

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row, with its copies adjacent. Items of lists are deep-copied."""
        repeated = {
            key: value.repeat_interleave(num_repeats, dim=0)
            if torch.is_tensor(value)
            else [deepcopy(item) for item in value for _ in range(num_repeats)]
            for key, value in self.data.items()
        }
        return type(self)(repeated)

    def select_indices(self, indices: list[int] | torch.Tensor) -> Self:
        """Return the rows at `indices`: a list or tensor of row numbers, in that order, or a bool tensor [B]."""
        index = torch.as_tensor(indices)
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
        selected = {
            key: value[index] if torch.is_tensor(value) else [value[i] for i in index.tolist()]
            for key, value in self.data.items()
        }
        return type(self)(selected)

    @property
    def size(self) -> int:
        """The number of rows: the length of the first key's value, or 0 without keys."""
        return len(next(iter(self.data.values()))) if self.data else 0
