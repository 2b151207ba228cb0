"""Data sets as lists of rows, with the part of `datasets.Dataset`'s interface that this package uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from nemo_rl_cpp.data.interfaces import Indexed, Row
from nemo_rl_cpp.data.plain_rows import row_at
from nemo_rl_cpp.data.random_order import permutation


class ListDataset:
    """Rows (dictionaries) by index; a column by its name. Transforming methods return a new data set."""

    def __init__(self, rows: Iterable[Mapping[str, object]]):
        self._rows: list[Row] = [dict(row) for row in rows]

    @classmethod
    def from_dict(cls, columns: Mapping[str, Sequence[object]]) -> ListDataset:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")
        return cls(dict(zip(columns, values)) for values in zip(*columns.values()))

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(dict(row) for row in self._rows)

    def __repr__(self) -> str:
        return f"ListDataset({len(self)} rows, columns {self.column_names})"

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: str) -> list[object]: ...
    def __getitem__(self, key: int | str) -> Row | list[object]:
        """A row by its number, or the list of a column's values by its name."""
        if isinstance(key, str):
            if key not in self.column_names:
                raise KeyError(f"the data set has no column {key!r}; it has {self.column_names}")
            return [row.get(key) for row in self._rows]
        return dict(self._rows[key])

    def select(self, indices: Iterable[int]) -> ListDataset:
        return ListDataset(self._rows[i] for i in indices)

    def map(
        self,
        function: Callable[..., Mapping[str, object]],
        remove_columns: Sequence[str] | None = None,
        with_indices: bool = False,
    ) -> ListDataset:
        """Each row updated with what the function returns for it (and, `with_indices`, its number); `remove_columns` of
        the old row are dropped."""
        removed = set(remove_columns or ())
        return ListDataset(
            {
                **{k: v for k, v in row.items() if k not in removed},
                **(function(dict(row), i) if with_indices else function(dict(row))),
            }
            for i, row in enumerate(self._rows)
        )

    def filter(self, function: Callable[[Row], bool]) -> ListDataset:
        return ListDataset(row for row in self._rows if function(dict(row)))

    def add_column(self, name: str, column: Sequence[object]) -> ListDataset:
        if len(column) != len(self):
            raise ValueError(f"the column {name!r} has {len(column)} values for {len(self)} rows")
        return ListDataset({**row, name: value} for row, value in zip(self._rows, column))

    def remove_columns(self, names: str | Sequence[str]) -> ListDataset:
        gone = {names} if isinstance(names, str) else set(names)
        return ListDataset({k: v for k, v in row.items() if k not in gone} for row in self._rows)

    def rename_column(self, old: str, new: str) -> ListDataset:
        return ListDataset({new if k == old else k: v for k, v in row.items()} for row in self._rows)

    def repeat(self, times: int) -> ListDataset:
        return ListDataset(self._rows * times)

    def shuffle(self, seed: int = 0) -> ListDataset:
        return self.select(permutation(len(self), seed, 0))

    def train_test_split(self, test_size: float | int, seed: int = 42) -> dict[str, ListDataset]:
        """{"train", "test"}: `test_size` rows, or that share of them rounded up, chosen by the seed."""
        count = test_size if isinstance(test_size, int) else math.ceil(test_size * len(self))
        if not 0 < count < len(self):
            raise ValueError(
                f"split_validation_size {test_size} of {len(self)} rows leaves {len(self) - count} rows to "
                f"train on and {count} to validate with; both must be at least 1"
            )
        order = permutation(len(self), seed, 0)
        return {"train": self.select(order[count:]), "test": self.select(order[:count])}


class ChainedDataset:
    """Several data sets of different kinds, one after another."""

    def __init__(self, parts: Sequence[Indexed[Row]]):
        self._parts = list(parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __getitem__(self, index: int) -> Row:
        left = index + len(self) if index < 0 else index
        for part in self._parts:
            if 0 <= left < len(part):
                return row_at(part, left)
            left -= len(part)
        raise IndexError(f"row {index} of {len(self)}")
