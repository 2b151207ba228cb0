"""The processes ("ranks") that train one model together, each a part of the samples of every global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    from nemo_rl_cpp._native import Communicator
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch


class OtherRankFailedError(RuntimeError):
    """This rank stopped because another one failed, which has the reason."""


@dataclass(frozen=True)
class Ranks:
    """Which part of the work this process does. By default it is the only one and does all of it.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        communicator: the way to the others; None where there are none.
        address: where processes of other machines reach this one; None: all are on this machine.
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    address: str | None = None

    def part(self, data: RaggedBatch, begin: int, end: int) -> list[int]:
        """This rank's share of the samples [begin, end), for work whose order does not matter."""
        return deal(data, begin, end, self.size)[self.rank]

    def blocks(self, data: RaggedBatch, begin: int, end: int, count: int | None) -> list[list[int]]:
        """This rank's blocks of a global batch, the samples [begin, end), of `count` in all; None: one block a rank. The blocks do
        not depend on the number of ranks, so neither do sums along the tree of blocks (csrc/distributed/gradient_sums.h).

        Raises ValueError where the ranks cannot have equally many.
        """
        count = self.size if count is None else count
        if count % self.size:
            raise ValueError(
                f"gradient_blocks is {count}, which {self.size} processes cannot share equally: take another number of processes, or null"
            )
        each = count // self.size
        return deal(data, begin, end, count)[self.rank * each : (self.rank + 1) * each]

    def whole(self, of_tokens: Tensor) -> Tensor:
        """[T] of which each rank has its own samples' part, and 0 elsewhere -> the whole, on every rank."""
        if self.communicator is None:
            return of_tokens
        parts = of_tokens.new_empty(self.size, *of_tokens.shape)
        self.communicator.all_gather(parts, of_tokens.contiguous(), phase="putting results of all ranks together")
        return parts.sum(0)

    def sum(self, value: float) -> float:
        """The sum over all ranks, in their order."""
        if self.communicator is None:
            return value
        own, all_ranks = torch.tensor([value], dtype=torch.float64), torch.empty(self.size, 1, dtype=torch.float64)
        self.communicator.all_gather(all_ranks, own, phase="adding a number of all ranks")
        return float(sum(all_ranks.flatten().tolist()))

    def fail_together(self, error: Exception | None) -> None:
        """Raises `error` if there is one, and OtherRankFailedError if another rank has one: none waits for a rank that has stopped."""
        failed = self.sum(0.0 if error is None else 1.0)
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailedError(f"rank {self.rank} stopped: {failed:.0f} of {self.size} ranks failed")

    def gather_shards(self, shard: Tensor, bounds: tuple[int, int], total: int, name: str) -> Tensor | None:
        """The whole [total] of which each rank has its shard [bounds), on rank 0; None on the others."""
        if self.communicator is None:
            return shard
        own, every = torch.tensor(bounds), torch.empty(self.size, 2, dtype=torch.int64)
        self.communicator.all_gather(every, own, phase=f"gathering {name}")
        if self.rank > 0:
            if shard.numel():
                self.communicator.send(shard, to=0, phase=f"gathering {name}")
            return None
        whole = torch.empty(total, dtype=shard.dtype)
        whole[bounds[0] : bounds[1]] = shard
        for rank, (begin, end) in enumerate(every.tolist()):
            if rank > 0 and end > begin:
                self.communicator.receive(whole[begin:end], source=rank, phase=f"gathering {name}")
        return whole


def deal(
    data: RaggedBatch, begin: int, end: int, parts: int, weights: Sequence[float] | None = None
) -> list[list[int]]:
    """The samples [begin, end) in `parts` lists, each ascending, of about equally many tokens, or equal sums of `weights` [B].

    Consecutive samples of one group (`group_id`, of prompts `draw_ids`) stay together, so that they share their prompt, unless there are fewer groups than parts.
    The longest unit goes first, each to the part with the fewest tokens so far, of equal ones to the first.
    """
    if parts == 1:
        return [list(range(begin, end))]
    lengths = data.lengths.tolist() if weights is None else weights
    groups = data.samples.get("group_id", data.samples.get("draw_ids"))
    groups = None if groups is None else torch.as_tensor(groups).tolist()
    units: list[list[int]] = []
    for row in range(begin, end):
        joins = units and groups is not None and groups[row] == groups[row - 1] >= 0
        units[-1].append(row) if joins else units.append([row])
    if len(units) < parts:
        units = [[row] for row in range(begin, end)]
    tokens = [sum(lengths[row] for row in unit) for unit in units]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for i in sorted(range(len(units)), key=lambda i: -tokens[i]):
        least = load.index(min(load))
        dealt[least] += units[i]
        load[least] += tokens[i]
    return [sorted(rows) for rows in dealt]


def connect(
    rank: int, size: int, host: str, port: int, deadline: float, address: str | None = None, backend: str = "gloo"
) -> Ranks:  # fmt: skip
    """Meets the other ranks at a TCP store that somebody holds at `host` and `port`.

    Args:
        deadline: seconds within which every call between ranks ends.
        address: where the others reach this process; None: at `host`, on one machine.
        backend: "gloo": tensors on the CPU. "nccl": those on this rank's GPU too, which becomes torch's current device. Of the GPUs that
            this process sees it is number `rank`, counted round.

    Raises ValueError for another backend, and for "nccl" where there is no GPU; what NCCL cannot do is a C.CommunicatorError.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"the backend of a communicator is {backend!r}: expected gloo or nccl")
    if size == 1:
        return Ranks(address=address)
    import torch.distributed as dist

    from nemo_rl_cpp._native import C

    gpu = _own_gpu(rank) if backend == "nccl" else None
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline))
    communicator = _by_gloo(store, rank, size, address or host, deadline)
    if gpu is not None:
        by_nccl = C.nccl_communicator(dist.PrefixStore("nccl", store), rank, size, gpu, deadline)
        communicator = C.communicator_by_device(communicator, by_nccl)
    return Ranks(rank, size, communicator, address)


def _by_gloo(store: dist.TCPStore, rank: int, size: int, address: str, deadline: float) -> Communicator:
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group

    from nemo_rl_cpp._native import C

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=deadline)
    options._threads = 2
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    name = f"nemo_rl_cpp_{store.port}"
    group._set_group_name(name)
    _register_process_group(name, group)
    return C.gloo_communicator(name, deadline)


def _own_gpu(rank: int) -> torch.device:
    """Workers of one machine see all its GPUs and take them in the order of their ranks; an actor of Ray sees its own alone."""
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(
            "NCCL was asked for, but torch sees no GPU: run on a machine with one a worker, or set cluster.device=cpu"
        )
    gpu = torch.device("cuda", rank % count)
    torch.cuda.set_device(gpu)
    return gpu


__all__ = ["OtherRankFailedError", "Ranks", "connect", "deal"]
