"""The processes ("ranks") that train one model together, each some samples of every global batch, or with tensor
parallelism the same samples with a slice of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.worker_calls import OtherRankFailedError

if TYPE_CHECKING:
    from nemo_rl_cpp._native import Communicator
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch

# Samples are trained on the rank that generated them if no block exceeds this multiple of the mean number of tokens.
# This saves a forward pass, which is a third of a training step or more.
MOST_UNEVEN = 1.25
# Minimum share of the busiest rank's load that a move must save to be worth its message.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class GradientSums:
    """Settings of how gradients are summed over ranks; the sums have the same bits with all settings. With `beside`,
    the gradients of each layer are summed while the backward pass of other layers still runs, in the last backward pass
    of the global batch, or with `sharded` of each gradient block (a part of the global batch, see `Ranks.blocks`). With
    `sharded`, which requires `beside`, each rank keeps only its shard of the sums (ZeRO-2), and gradient blocks are
    assigned to ranks round-robin."""

    beside: bool = False
    sharded: bool = False


@dataclass(frozen=True)
class Ranks:
    """The position of this process among the ranks. By default it is the only process.

    "Group" means a tensor-parallel group: its processes have the same samples, and each has a slice of the model.

    Attributes:
        rank: index of this process, or of its group, from 0.
        size: number of processes, or of groups.
        communicator: connects the processes with the same slice of the model; None for a single process.
        tensor: connects the processes of this group; None: the model is not sliced.
        world: connects all processes, if there are groups.
        meet: returns a communicator for the processes with the given world ranks (ranks among all processes), which
            include this process. Different labels give separate communicators for the same processes; equal labels give
            the same communicator.
        members: world ranks of the processes in `communicator`.
        address: where other machines reach this process; None: all processes are on this machine.
        mesh: returns the same processes as a torch.distributed mesh, for FSDP2.
        device: the device of this process's models.
        sharers: number of processes of this cluster that use the memory of `device`."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    address: str | None = None
    tensor: Communicator | None = None
    world: Communicator | None = None
    meet: Callable[..., Communicator] | None = None
    mesh: Callable[[], DeviceMesh] | None = None
    members: tuple[int, ...] = ()
    device: str = "cpu"
    sharers: int = 1

    @property
    def tensor_size(self) -> int:
        """The number of slices into which tensor parallelism divides the model."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def tensor_rank(self) -> int:
        """The process's rank in its tensor-parallel group, which is the index of its slice of the model."""
        return 0 if self.tensor is None else self.tensor.rank

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of all, which writes the files."""
        return self.rank == 0 and self.tensor_rank == 0

    def split(self, tensor_size: int) -> Ranks:
        """Return this process's `Ranks` after dividing the processes into tensor-parallel groups of `tensor_size`
        consecutive ranks. All processes must call this."""
        if tensor_size == 1:
            return self
        group, place = divmod(self.rank, tensor_size)
        count = self.size // tensor_size
        tensor = self.meet(tuple(range(group * tensor_size, (group + 1) * tensor_size)))
        members = tuple(range(place, self.size, tensor_size))
        same_slice = self.meet(members) if count > 1 else None
        return replace(
            self, rank=group, size=count, communicator=same_slice, tensor=tensor, world=self.communicator, mesh=None, members=members
        )  # fmt: skip

    def beside(self) -> Communicator | None:
        """Return a second communicator for the processes of `communicator`, so that another thread can use it at the
        same time; None for a single process. All of these processes must call this method."""
        return None if self.communicator is None or self.meet is None else self.meet(self.members, "beside")

    def tensor_least(self, value: int) -> int:
        """Return the minimum of `value` over this tensor-parallel group, so that all its processes use one number."""
        if self.tensor is None:
            return value
        every = torch.empty(self.tensor_size, 1, dtype=torch.int64)
        self.tensor.all_gather(every, torch.tensor([value]), phase="agreeing on a limit")
        return int(every.min())

    def part(self, data: RaggedBatch) -> list[int]:
        """Return the indices of the samples that this rank processes in work whose results do not depend on which rank
        processes a sample, such as computing log-probabilities."""
        return deal(data, 0, data.size, self.size)[self.rank]

    def blocks(
        self, data: RaggedBatch, begin: int, end: int, count: int | None, in_turns: bool = False
    ) -> list[list[int]]:
        """Return the sample indices of each of this rank's gradient blocks. Gradient blocks are the `count` parts
        (None: one per rank) into which the global batch, the samples [begin, end), is divided. Neither the blocks nor
        the order in which their gradients are summed (csrc/distributed/gradient_sums.h) depends on the number of ranks.
        With `in_turns` they are assigned round-robin; otherwise each rank gets consecutive ones.

        A sample is trained where it was generated (`generated_by`), because its activations may be kept there, unless
        the lengths of the responses make that too uneven."""
        count = self.size if count is None else count
        dealt = deal(data, begin, end, count, prompt_lengths(data) if count > 1 else None)
        tokens = [int(data.lengths[rows].sum()) for rows in dealt]
        if max(tokens) * count > MOST_UNEVEN * sum(tokens):
            dealt = deal(data, begin, end, count)
        return _blocks_of(dealt, self.rank, self.size, in_turns)

    def even_block(self, data: RaggedBatch, begin: int, end: int, idle: Tensor) -> tuple[list[int], list[Move]]:
        """Return (the samples that this rank trains, the `Move`s of all ranks). Each rank starts with the samples that
        it generated. Moves then balance the samples with a backward pass (not `idle`, bool [B])."""
        dealt = deal(data, begin, end, self.size, prompt_lengths(data))
        moves = even_moves([_units(data, rows, idle.tolist()) for rows in dealt])
        blocks = [set(rows) for rows in dealt]
        for rows, source, target in moves:
            blocks[source].difference_update(rows)
            blocks[target].update(rows)
        return sorted(blocks[self.rank]), moves

    def whole(self, of_tokens: Tensor) -> Tensor:
        """Return the sum of `of_tokens` [T] over all ranks. Each rank passes 0 for the samples of other ranks."""
        if self.communicator is None:
            return of_tokens
        parts = of_tokens.new_empty(self.size, *of_tokens.shape)
        self.communicator.all_gather(parts, of_tokens.contiguous(), phase="putting results of all ranks together")
        return parts.sum(0)

    def sum(self, value: float) -> float:
        """Return the sum of `value` over all ranks, added in rank order."""
        return _sum(self.communicator, value)

    def fail_together(self, error: Exception | None) -> None:
        """Raise `error` if it is not None, and OtherRankFailedError if another rank has passed an error, so that no
        rank waits for one that has stopped. All ranks must call this."""
        world = self.world or self.communicator
        failed = _sum(world, 0.0 if error is None else 1.0)
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailedError(f"rank {world.rank} stopped: {failed:.0f} of {world.size} ranks failed")

    def gather_shards(self, shard: Tensor, bounds: tuple[int, int], total: int, name: str) -> Tensor | None:
        """Gather a tensor of `total` elements, of which each rank holds the part from `bounds[0]` to `bounds[1]`.
        Return it on rank 0, and None on other ranks."""
        if self.communicator is None:
            return shard
        shard = shard.cpu()  # no GPU needs to have room for the whole
        phase, every = f"gathering {name}", torch.empty(self.size, 2, dtype=torch.int64)
        self.communicator.all_gather(every, torch.tensor(bounds), phase=phase)
        if self.rank > 0:
            if shard.numel():
                self.communicator.send(shard, to=0, phase=phase)
            return None
        whole = torch.empty(total, dtype=shard.dtype)
        whole[bounds[0] : bounds[1]] = shard
        for rank, (begin, end) in enumerate(every.tolist()):
            if rank > 0 and end > begin:
                self.communicator.receive(whole[begin:end], source=rank, phase=phase)
        return whole


def _sum(ranks: Communicator | None, value: float) -> float:
    if ranks is None:
        return value
    own, every = torch.tensor([value], dtype=torch.float64), torch.empty(ranks.size, 1, dtype=torch.float64)
    ranks.all_gather(every, own, phase="adding a number of all ranks")
    return float(sum(every.flatten().tolist()))


def deal(
    data: RaggedBatch, begin: int, end: int, parts: int, weights: Sequence[float] | None = None
) -> list[list[int]]:
    """Divide the samples [begin, end) into parts with about equal numbers of tokens, or if `weights` [B] is given, with
    about equal sums of the samples' weights. Return each part's sample indices in ascending order. Consecutive samples
    with the same `group_id` (without it, `draw_ids`) stay together, to share their prompt, unless there are fewer
    groups than parts. The largest group is assigned first, each to the first of the parts with the fewest tokens so
    far."""
    if parts == 1:
        return [list(range(begin, end))]
    lengths = data.lengths.tolist() if weights is None else weights
    groups = _groups_of(data, data.samples.get("draw_ids"))
    units: list[list[int]] = []
    for row in range(begin, end):
        joins = units and groups[row] == groups[row - 1] >= 0
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


def _groups_of(data: RaggedBatch, default: object = None) -> list[int]:
    """Return the `group_id` of each sample; if the batch has none, `default` (a value per sample), or -1 if that is
    None."""
    groups = data.samples.get("group_id", default)
    return [-1] * data.size if groups is None else torch.as_tensor(groups).tolist()


def _units(data: RaggedBatch, rows: list[int], idle: list[bool]) -> list[tuple[list[int], int]]:
    """Group by prompt those of the samples `rows` that get a backward pass (not `idle`, one bool per sample of the
    batch). Return (samples, number of tokens) of each group, with the prompt counted once."""
    groups, lengths, prompts, units = _groups_of(data), data.lengths.tolist(), prompt_lengths(data), {}
    for row in rows:
        if not idle[row]:
            units.setdefault(("group", groups[row]) if groups[row] >= 0 else ("row", row), []).append(row)
    return [(own, prompts[own[0]] + sum(lengths[row] - prompts[row] for row in own)) for own in units.values()]


class Move(NamedTuple):
    """A move of the samples `rows` from rank `source`, which generated them, to rank `target`, which trains them."""

    rows: list[int]
    source: int
    target: int


def even_moves(units: Sequence[Sequence[tuple[list[int], int]]]) -> list[Move]:
    """Return moves of samples between ranks that reduce the cost of the busiest rank. `units[rank]` lists (samples that
    must stay together, their cost). Each move goes from the busiest rank to the least busy one, and takes the unit
    after which the larger of their two costs is smallest. Moves end when the next would reduce the busiest rank's cost
    by less than the fraction LEAST_GAIN. Every rank computes the same moves."""
    left = [list(own) for own in units]
    load = [sum(cost for _, cost in own) for own in left]
    found: list[Move] = []
    while True:
        source, target = load.index(max(load)), load.index(min(load))
        after = [max(load[source] - cost, load[target] + cost) for _, cost in left[source]]
        if not after or min(after) > (1 - LEAST_GAIN) * load[source]:
            return found
        rows, cost = left[source].pop(after.index(min(after)))
        load[source] -= cost
        load[target] += cost
        found.append(Move(rows, source, target))


def prompt_lengths(data: RaggedBatch) -> list[int]:
    """Return the number of tokens before each sample's first trained token, or of all tokens if none is trained."""
    mask = data.tokens.get("token_mask")
    if mask is None:
        return data.lengths.tolist()
    trained = mask.nonzero().flatten()
    samples = data.sample_of_token[trained]
    return data.lengths.scatter_reduce(0, samples, trained - data.offsets[samples], "amin").tolist()


def generated_by(
    prompts: RaggedBatch, ranks: int, blocks: int | None, global_batch: int, in_turns: bool = False
) -> list[list[int]]:
    """Return, for each of the `ranks` ranks, the rows of `prompts` to which that rank generates the responses. Every
    `global_batch` rows are divided into `blocks` gradient blocks, whose gradients are summed separately first (None:
    one block per rank). Each rank gets consecutive blocks, or with `in_turns` every `ranks`-th block."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for begin in range(0, prompts.size, global_batch):
        dealt = deal(prompts, begin, min(prompts.size, begin + global_batch), blocks or ranks)
        for rank, share in enumerate(shares):
            share += chain.from_iterable(_blocks_of(dealt, rank, ranks, in_turns))
    return [sorted(rows) for rows in shares]


def _blocks_of(dealt: list[list[int]], rank: int, ranks: int, in_turns: bool) -> list[list[int]]:
    """Return the elements of `dealt`, one list of samples per gradient block, that belong to rank `rank` of `ranks`:
    every `ranks`-th one with `in_turns`, otherwise consecutive ones."""
    each = len(dealt) // ranks
    return dealt[rank::ranks] if in_turns else dealt[rank * each : (rank + 1) * each]


def connect(
    rank: int, size: int, host: str, port: int, deadline: float, address: str | None = None, backend: str = "gloo"
) -> Ranks:  # fmt: skip
    """Join the rendezvous of all ranks at the TCP store at `host` and `port`, with the timeout `deadline` in seconds of
    every message, and return this process's `Ranks`, after a test of all connections (csrc/distributed/self_test.h).
    Other ranks reach this process at `address` (None: at `host`, all on one machine).

    The `backend` "gloo" sends tensors on the CPU; "nccl" also those on the only GPU that this process sees. Between
    ranks that share a GPU these pass through the CPU's memory, because NCCL connects one rank a GPU. Raise ValueError
    for "nccl" without a GPU, and C.CommunicatorError for errors of a connection and for a failed test."""
    gpu = _own_gpu() if backend == "nccl" else None
    device = torch.device("cpu") if gpu is None else gpu
    if size == 1:
        return Ranks(address=address, device=str(device))
    limit = timedelta(seconds=deadline)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    places = [""] * size if gpu is None else _gpus_of_ranks(store, rank, size, gpu)

    def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta = limit) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address or host)]
        options._timeout, options._threads = timeout, 2
        return dist.ProcessGroupGloo(store, rank, size, options)

    @cache
    def meet(members: tuple[int, ...], label: str = "") -> Communicator:
        label += "_".join(map(str, members)) if len(members) < size else ""
        place = members.index(rank), len(members)
        backend = gloo(dist.PrefixStore(f"gloo{label}", store), *place)
        group = dist.ProcessGroup(store, *place)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        name = f"nemo_rl_cpp_{store.port}_{label}"
        group._set_group_name(name)
        _register_process_group(name, group)
        communicator = C.gloo_communicator(name, deadline)
        if gpu is None:
            return communicator
        if len({places[member] for member in members}) < len(members):
            on_gpus = C.communicator_through_cpu(communicator)
        else:
            on_gpus = C.nccl_communicator(dist.PrefixStore(f"nccl{label}", store), *place, gpu, deadline)
        return C.communicator_by_device(communicator, on_gpus)

    @cache
    def mesh() -> DeviceMesh:
        if gpu is not None and len(set(places)) < size:
            raise ValueError("policy.backend hf needs a GPU for each process: lower cluster.gpus_per_node")
        name = "nemo_rl_cpp_gloo"  # unlike with torch's "gloo", ranks meet at `address`, not at the host's name
        dist.Backend.register_backend(name, gloo, devices="cpu")
        options = dict(store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
        backends = f"cpu:{name}" if device.type == "cpu" else f"cpu:{name},cuda:nccl"
        dist.init_process_group(backends, timeout=limit, **options)
        return init_device_mesh(device.type, (size,))

    everybody = tuple(range(size))
    communicator = meet(everybody)
    C.self_test(communicator, device, _TESTED[device.type])
    return Ranks(
        rank, size, communicator, address, meet=meet, mesh=mesh, members=everybody, device=str(device), sharers=places.count(places[rank])
    )  # fmt: skip


_TESTED = {"cpu": 1 << 12, "cuda": 1 << 20}  # device -> numbers of a message of the test: on GPUs as long as a run's


def _own_gpu() -> torch.device:
    if torch.cuda.device_count() == 0:
        raise ValueError("NCCL needs a GPU for each worker, and torch sees none: set cluster.device=cpu")
    return torch.device("cuda", 0)


def _gpus_of_ranks(store: dist.Store, rank: int, size: int, gpu: torch.device) -> list[str]:
    """Return the identifier of each rank's GPU, which all ranks write to `store`."""
    store.set(f"gpu{rank}", str(torch.cuda.get_device_properties(gpu).uuid))
    return [store.get(f"gpu{member}").decode() for member in range(size)]
