"""Data loaders for the training loop. The order of the prompts depends only on a seed and the position in the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nemo_rl_cpp.config.data import DataConfig, other_rows
from nemo_rl_cpp.data.interfaces import DatumSpec, Indexed
from nemo_rl_cpp.data.random_order import permutation
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.dotted_names import import_object
from nemo_rl_cpp.user_code import call_user


def rl_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[DatumSpec]:
    """Return a list of B rows as a batch: `length`, `loss_multiplier` and `batch_max_length` (the largest length) as
    tensors [B], the other keys as lists."""
    length = torch.tensor([datum["length"] for datum in data_batch])
    weights = torch.tensor([float(datum["loss_multiplier"]) for datum in data_batch], dtype=torch.float32)
    longest = torch.ones_like(length) * length.max()
    lists = {name: [datum[name] for datum in data_batch] for name in ("message_log", "extra_env_info", "idx")}
    lists |= {name: [datum.get(name) for datum in data_batch] for name in ("task_name", "stop_strings")}
    return BatchedDataDict(lists, length=length, loss_multiplier=weights, batch_max_length=longest)


class StatefulDataLoader:
    """A loader that yields batches of `batch_size` rows, in an order that depends only on seed and epoch. The position
    in the data is therefore two numbers (epoch and row), which are saved after every step. A resumed loader continues
    with the next rows, whatever the batch size. After a state was loaded, `iter()` continues the unfinished epoch if it
    has a batch left; otherwise `iter()` begins the next epoch. `drop_last` skips an incomplete last batch. With
    `num_workers` > 0, that many threads tokenize the next batch while the caller uses the current one; then the result
    of a processor must not depend on its earlier calls."""

    def __init__(
        self, dataset: Indexed[DatumSpec], batch_size: int, shuffle: bool = False,
        collate_fn: Callable[[list[DatumSpec]], BatchedDataDict] = rl_collate_fn, drop_last: bool = False, seed: int = 42,
        num_workers: int = 0,
    ):  # fmt: skip
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.collate_fn, self.drop_last, self.seed, self.num_workers = collate_fn, drop_last, seed, num_workers
        self.epoch = 0  # the number of epochs that were finished or abandoned before the current one
        self._cursor = 0  # rows of this epoch that were returned
        self._resume = True  # the next iter() continues at the cursor
        self._newest = 0  # id of the iterator that may advance the position
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def state_dict(self) -> dict[str, int | bool]:
        here = {"epoch": self.epoch, "cursor": self._cursor}
        return here | {"seed": self.seed, "shuffle": self.shuffle, "num_rows": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Restore a saved position. Raise ValueError if the number of rows, the seed or `shuffle` has changed."""
        given = {"seed": self.seed, "shuffle": self.shuffle}
        faults = [f"has {key} {now}, not {state[key]} as before" for key, now in given.items() if now != state[key]]
        if fault := next(iter(faults), other_rows(len(self.dataset), int(state["num_rows"]))):
            raise ValueError(f"data.train {fault}: set it back, or start a new run in another checkpoint_dir")
        self.epoch, self._cursor, self._resume = int(state["epoch"]), int(state["cursor"]), True
        self._newest += 1

    def __iter__(self) -> Iterator[BatchedDataDict]:
        rows = len(self.dataset)
        # the state may have been saved with smaller batches, and have too few rows left for one of this size
        no_batch_left = self.drop_last and rows - self._cursor < self.batch_size
        if self._cursor and (not self._resume or no_batch_left):
            self.epoch, self._cursor = self.epoch + 1, 0
        self._resume = False
        self._newest += 1
        order = permutation(rows, self.seed, self.epoch) if self.shuffle else list(range(rows))
        return self._batches(order, self._cursor, self._newest)

    def _batches(self, order: list[int], start: int, number: int) -> Iterator[BatchedDataDict]:
        size = self.batch_size
        chunks = [order[at : at + size] for at in range(start, len(order), size)]
        chunks = [chunk for chunk in chunks if len(chunk) == size or not self.drop_last]
        ahead = self._submit(chunks[0]) if chunks else None
        for i, chunk in enumerate(chunks):
            rows = ahead()
            ahead = self._submit(chunks[i + 1]) if i + 1 < len(chunks) else None
            if number != self._newest:
                raise RuntimeError("this iterator of the data loader was left behind by a newer one")
            self._cursor += len(chunk)
            if i + 1 == len(chunks):
                # the epoch is over: a state saved from now on begins the next epoch
                self.epoch, self._cursor, self._resume = self.epoch + 1, 0, True
            yield self.collate_fn(rows)

    def _submit(self, chunk: list[int]) -> Callable[[], list[DatumSpec]]:
        """Start processing the rows `chunk`, and return a function that waits for the results."""
        if self.num_workers < 1:
            return lambda: [self.dataset[i] for i in chunk]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="data")
        futures: list[Future[DatumSpec]] = [self._pool.submit(self.dataset.__getitem__, i) for i in chunk]
        return lambda: [future.result() for future in futures]


class MultipleDataloaderWrapper(Iterator[BatchedDataDict]):
    """A loader that combines one loader per task. For each step it takes batches of `data.num_prompts_per_dataloader`
    prompts round-robin, until it has `expected_num_prompts`. An exhausted loader starts over. As in NeMo RL, the
    combined loader has no epochs.

    `data.custom_dataloader` is the dotted path of a function (data_iterators, dataloaders) -> (batch, data_iterators)
    that chooses the prompts instead. State inside the function is not saved."""

    def __init__(
        self, expected_num_prompts: int, data_config: DataConfig, dataloaders: Mapping[str, StatefulDataLoader]
    ):
        self.expected_num_prompts = expected_num_prompts
        self.dataloaders = dict(dataloaders)
        self.data_iterators = {name: iter(loader) for name, loader in dataloaders.items()}
        self._turn = 0
        path = data_config.custom_dataloader
        self._custom = import_object(path, "data.custom_dataloader") if path else None

    def __next__(self) -> BatchedDataDict:
        if self._custom is not None:
            batch, self.data_iterators = call_user(self._custom, self.data_iterators, self.dataloaders)
        else:
            batch = self._in_turn()
        size = batch.size if hasattr(batch, "size") else len(next(iter(batch.values())))
        if size != self.expected_num_prompts:
            source = "data.num_prompts_per_dataloader" if self._custom is None else "data.custom_dataloader"
            raise ValueError(f"{source} gives {size} prompts, not {self.expected_num_prompts} (num_prompts_per_step)")
        return batch

    def _in_turn(self) -> BatchedDataDict:
        names, parts, count = list(self.dataloaders), [], 0
        while count < self.expected_num_prompts:
            part = self._next_of(names[self._turn % len(names)])
            self._turn += 1
            count += part.size
            parts.append(part)
        batch = BatchedDataDict.from_batches(parts)
        # the maximum over the batch, not over each part
        batch["batch_max_length"] = batch["length"].new_full((batch.size,), int(batch["length"].max()))
        return batch

    def _next_of(self, name: str) -> BatchedDataDict:
        try:
            return next(self.data_iterators[name])
        except StopIteration:
            self.data_iterators[name] = iter(self.dataloaders[name])
            return next(self.data_iterators[name])

    def state_dict(self) -> dict[str, object]:
        loaders = {name: loader.state_dict() for name, loader in self.dataloaders.items()}
        return {"turn": self._turn, "dataloaders": loaders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["dataloaders"]
        if set(saved) != set(self.dataloaders):
            raise ValueError(f"the saved position is for the tasks {sorted(saved)}, not {sorted(self.dataloaders)}")
        for name, loader in self.dataloaders.items():
            loader.load_state_dict(saved[name])
            self.data_iterators[name] = iter(loader)
        self._turn = int(state["turn"])


def save_dataloader_state(dataloader: StatefulDataLoader | MultipleDataloaderWrapper, checkpoint: Path) -> None:
    file = checkpoint / "train_dataloader.json"
    file.write_text(json.dumps(dataloader.state_dict(), indent=2) + "\n", encoding="utf-8")


def load_dataloader_state(dataloader: StatefulDataLoader | MultipleDataloaderWrapper, checkpoint: Path) -> None:
    """Restore the loader's position in the data from a checkpoint folder. Raise FileNotFoundError if the checkpoint has
    none, and ValueError if the number of rows, the seed or `shuffle` has changed."""
    dataloader.load_state_dict(json.loads((checkpoint / "train_dataloader.json").read_text(encoding="utf-8")))
