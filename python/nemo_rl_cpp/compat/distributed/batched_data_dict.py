"""NeMo RL's `BatchedDataDict`: the house's, which is also sharded, packed into micro-batches, gathered, and may carry images."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from nemo_rl_cpp.compat.data.multimodal_utils import PackedTensor
from nemo_rl_cpp.compat.distributed.sharding import (
    BatchError,
    DynamicBatchingArgs,
    SequencePackingArgs,
    shard_dynamic,
    shard_packed,
    shard_plain,
)
from nemo_rl_cpp.distributed import batched_data_dict as house
from nemo_rl_cpp.distributed.batched_data_dict import DictT, rows_of


class BatchedDataDict(house.BatchedDataDict[DictT]):
    """A dictionary of rows that is sliced, sharded, joined and iterated over in micro-batches as one. A batch that the house
    made becomes one by `BatchedDataDict(batch)`.

    `micro_batch_indices`, `micro_batch_lengths` and `elem_counts_per_gb` are None, or describe the micro-batches that
    `shard_by_batch_size` planned: [chunk][micro-batch] -> [first row, end row) within the chunk, its tokens (packing)
    or padded length (dynamic batching), and the rows of every chunk.
    """

    # Tensors that belong to a multimodal model's input although they are plain tensors.
    ADDITIONAL_OPTIONAL_KEY_TENSORS = ["token_type_ids"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    # ---- joining and copying

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[Any, Any]],
        pad_value_dict: dict[str, int | float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """As the house's; `PackedTensor`s are joined item by item. With `allow_missing_packed_tensors` a batch that lacks a
        `PackedTensor` gets empty items instead of a KeyError."""
        filled = [batch for batch in batches if len(batch) > 0]
        return super().from_batches(
            _with_empty_items(filled) if allow_missing_packed_tensors else filled, pad_value_dict
        )

    @classmethod
    def _join(cls, key: str, values: list[Any], pad_value: int | float) -> Any:
        if all(isinstance(value, PackedTensor) for value in values):
            return PackedTensor.concat(values)
        return super()._join(key, values, pad_value)

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Every row `num_repeats` times, copies side by side; list items are deep copies of their own.

        `share_immutable_media`: the items of a `PackedTensor` are the same tensors instead of copies.
        """
        media = {key: value for key, value in self.data.items() if isinstance(value, PackedTensor)}
        others = house.BatchedDataDict({key: value for key, value in self.data.items() if key not in media})
        repeated = others.repeat_interleave(num_repeats)
        for key, value in media.items():
            repeated[key] = value.repeat_interleave(num_repeats, share=share_immutable_media)
        return type(self)({key: repeated[key] for key in self.data})

    def all_gather(self, group: "torch.distributed.ProcessGroup") -> Self:
        """The rows of all ranks of `group`, in rank order; ranks may hold different numbers of rows."""
        gathered = type(self)()
        for key, value in self.data.items():
            gathered[key] = _gather_tensor(value, group) if torch.is_tensor(value) else _gather_list(value, group)
        return gathered

    # ---- selecting rows

    @staticmethod
    def _select(value: Any, index: torch.Tensor) -> Any:
        if isinstance(value, PackedTensor):
            return value.slice(index.tolist())
        return house.BatchedDataDict._select(value, index)

    def part(self, rows: list[int] | torch.Tensor) -> "SlicedDataDict":
        """The rows at these places, as a copy."""
        return SlicedDataDict(self.select_indices(rows).data)

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Rows [start, end); tensors share storage with this batch.

        Raises BatchError when `end` lies beyond a tensor's rows.
        """
        try:
            return SlicedDataDict(super().slice(start, end).data)
        except ValueError as error:
            raise BatchError(str(error)) from None

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Part `rank` of `chunks` nearly equal consecutive parts (the first ones are larger), as a copy.

        Raises BatchError unless rows // chunks > rank (NeMo RL's rule: stricter than needed for small batches).
        """
        rows = self._common_size()
        if not rows // chunks > rank:
            raise BatchError(f"part {rank} of {chunks} parts was asked of a batch of {rows} rows")
        index = torch.arange(rows).tensor_split(chunks)[rank]
        return self.part(index)

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict":
        """Global batch number `batch_idx`: by the packing plan if there is one, else `batch_size` rows."""
        if self.elem_counts_per_gb is not None:
            start = sum(self.elem_counts_per_gb[:batch_idx])
            batch = self.slice(start, start + self.elem_counts_per_gb[batch_idx])
            batch.elem_counts_per_gb = [self.elem_counts_per_gb[batch_idx]]
        elif batch_size is None:
            raise BatchError("get_batch needs batch_size: this batch carries no packing plan to take it from")
        else:
            batch = self.slice(batch_size * batch_idx, batch_size * (batch_idx + 1))
        if self.micro_batch_indices is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    def reorder_data(self, reorded_indices: list[int]) -> None:
        """Undoes a shuffle in place: row i moves to position `reorded_indices[i]`.

        With the index list of `shard_by_batch_size`, the joined results of the shards return to the original order.
        """
        order = torch.argsort(torch.as_tensor(reorded_indices, dtype=torch.long), stable=True)
        for key, value in self.data.items():
            self.data[key] = self._select(value, order)

    # ---- sharding

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]":
        """Splits every chunk of `batch_size` rows over `shards` and joins each shard's parts.

        Plain: shard i holds the i-th consecutive part of every chunk; a list of shards is returned.
        Dynamic batching: rows of a chunk are sorted by length and dealt out in turn, and micro-batches common to all
        shards keep rows x padded length within the budget. Sequence packing: rows are packed into bins and bin j
        goes to shard j mod `shards`. Both return (shards, original row index of every row in shard order; chunk-major
        with dynamic batching) and leave the plan in `micro_batch_indices` and `micro_batch_lengths`.

        Args:
            batch_size: rows of a chunk (a global batch); all rows if None.
            allow_uneven_shards: shards hold ceil(rows / shards) rows, the last ones fewer; needs batch_size None.

        Raises BatchError when sizes do not divide, or when packing and dynamic batching are both asked for.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args cannot be passed together: set "
                "policy.sequence_packing.enabled=false or policy.dynamic_batching.enabled=false"
            )
        if allow_uneven_shards and batch_size is not None:
            raise BatchError(f"allow_uneven_shards=True needs batch_size=None, but it is {batch_size}")
        rows = self._common_size()
        size = rows if batch_size is None else batch_size
        if size <= 0 and rows > 0:
            raise BatchError(f"batch_size must be positive, not {batch_size}")
        if size and rows % size:
            raise BatchError(f"Total batch size {rows} is not a multiple of batch_size {size}")
        if not allow_uneven_shards and size % shards:
            raise BatchError(f"Batch size {size} is not a multiple of shards {shards}")
        if dynamic_batching_args is not None:
            return shard_dynamic(self, shards, size, dynamic_batching_args)
        if sequence_packing_args is not None:
            return shard_packed(self, shards, size, sequence_packing_args)
        return shard_plain(self, shards, size)

    # ---- micro-batches

    def make_microbatch_iterator(self, microbatch_size: int) -> "Iterator[SlicedDataDict]":
        """Consecutive slices of `microbatch_size` rows; BatchError when that does not divide the rows."""
        if self.size % microbatch_size:
            raise BatchError(f"micro-batch size {microbatch_size} does not divide the batch's {self.size} rows")
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> "Iterator[SlicedDataDict]":
        """The planned micro-batches, tensors cut along `sequence_dim` to the micro-batch's length."""
        for length, (start, end) in zip(self._plan(self.micro_batch_lengths), self._plan(self.micro_batch_indices)):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(dim=sequence_dim, truncated_len=length)
            yield microbatch

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of planned micro-batches."""
        return len(self._plan(self.micro_batch_indices))

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict]":
        """The planned bins, each a micro-batch of rows that the model packs into one sequence of tokens."""
        for start, end in self._plan(self.micro_batch_indices):
            yield self.slice(start, end)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """(number of planned bins, tokens of the fullest)."""
        return len(self._plan(self.micro_batch_indices)), max(self._plan(self.micro_batch_lengths))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cuts every tensor that has dimension `dim` to at most `truncated_len` there, in place."""
        for key, value in self.data.items():
            if torch.is_tensor(value) and value.dim() > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    # ---- the rest

    def to(self, device: str | torch.device) -> Self:
        """Moves all tensors, in place."""
        for key, value in self.data.items():
            if isinstance(value, (torch.Tensor, PackedTensor)):
                self.data[key] = value.to(device)
        return self

    def get_dict(self) -> dict[Any, Any]:
        """The plain dictionary inside (not a copy)."""
        return self.data

    def get_multimodal_dict(
        self, as_tensors: bool = False, device: torch.device | None = None, pixel_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """The entries that only multimodal models take: every `PackedTensor`, and `token_type_ids`.

        With `as_tensors` a `PackedTensor` becomes its one tensor (entries without any content are left out), moved to
        `device`; `pixel_values` is cast to `pixel_dtype`.
        """
        found: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, PackedTensor) and as_tensors:
                value = value.as_tensor(device=device)
                if value is not None:
                    found[key] = value.to(pixel_dtype) if pixel_dtype is not None and key == "pixel_values" else value
            elif isinstance(value, PackedTensor):
                found[key] = value
            elif key in self.ADDITIONAL_OPTIONAL_KEY_TENSORS:
                found[key] = value.to(device) if device is not None else value
        return found

    def _common_size(self) -> int:
        sizes = {key: rows_of(value) for key, value in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"Batch sizes are not the same across the rollout batch: {sizes}")
        return next(iter(sizes.values()), 0)

    def _plan(self, planned: list | None) -> list:
        if planned is None or len(planned) != 1:
            raise BatchError(
                "a planned micro-batch iterator needs exactly one chunk: call shard_by_batch_size with "
                "dynamic_batching_args or sequence_packing_args, then get_batch for one global batch"
            )
        return planned[0]


class SlicedDataDict(BatchedDataDict):
    """Part of a batch, made by slicing or sharding; its tensors may share storage with the whole."""


def _with_empty_items(batches: list[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """The batches; those with rows that lack a `PackedTensor` of another have one without content."""
    media = {key: value for batch in batches for key, value in batch.items() if isinstance(value, PackedTensor)}
    completed = []
    for batch in batches:
        rows = rows_of(next(iter(batch.values())))
        lacking = {key: value for key, value in media.items() if key not in batch}
        empty = {key: PackedTensor([None] * rows, value.dim_to_pack) for key, value in lacking.items()} if rows else {}
        completed.append({**batch, **empty})
    return completed


def _gather_list(items: list[Any], group: Any) -> list[Any]:
    parts: list[list[Any] | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, items, group=group)
    return [item for part in parts for item in part]


def _gather_tensor(value: torch.Tensor, group: Any) -> torch.Tensor:
    ranks = torch.distributed.get_world_size(group)
    shape = torch.tensor(value.shape, device=value.device)
    shapes = [torch.zeros_like(shape) for _ in range(ranks)]
    torch.distributed.all_gather(shapes, shape, group=group)
    # NCCL and Gloo gather equal shapes only: pad the rows, cut them off afterwards
    widest = value.new_zeros((max(int(s[0]) for s in shapes), *value.shape[1:]))
    widest[: value.shape[0]] = value
    parts = [torch.empty_like(widest) for _ in range(ranks)]
    torch.distributed.all_gather(parts, widest, group=group)
    return torch.cat([part[: int(s[0])] for part, s in zip(parts, shapes)])
