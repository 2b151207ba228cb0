"""The workers behind a policy or an engine: one object on each device of a cluster, under one handle."""

import pickle
from collections.abc import Callable
from itertools import count
from typing import Any

from nemo_rl_cpp.distributed.futures import Future, get
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster

_TARGETS = count(1)  # objects in worker processes, over all groups


class RayWorkerGroup:
    """One object on every worker of a cluster; methods run on all of them.

    Where the one worker is this process, the object lives here and is called directly: no pickling, no copies. Else each lives in
    a worker, so the builder, arguments and results are pickled. Several groups may share the workers of a cluster.

    Args:
        remote_worker_builder: makes the object, from the `Ranks` of its worker.
        tensor_size: so many neighbours have slices of one model each, and work on the same samples.
    """

    def __init__(
        self, cluster: RayVirtualCluster, remote_worker_builder: Callable[[Ranks], object], tensor_size: int = 1
    ) -> None:
        self.cluster = cluster
        self.tensor_size = tensor_size
        self._workers: list[object] = []
        self._target = next(_TARGETS)
        if cluster.in_process:
            self._workers = [remote_worker_builder(Ranks())]
        else:
            self.call_all("__create__", remote_worker_builder)

    @property
    def workers(self) -> list[object]:
        """The objects themselves, where they live in this process."""
        return self._workers

    @property
    def dp_size(self) -> int:
        """Number of data-parallel workers, or groups of workers."""
        return self.cluster.world_size() // self.tensor_size

    def first_of_groups(self, values: list[Any]) -> list[Any]:
        """Of one value a worker those of the first worker of each group: the others repeat them."""
        return values[:: self.tensor_size]

    def for_workers(self, values: list[Any]) -> list[Any]:
        """Of one value a group one for each of its workers."""
        return [value for value in values for _ in range(self.tensor_size)]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: object, **kwargs: object
    ) -> Future:
        """Calls the method on one worker."""
        if self._workers:
            return Future.completed(getattr(self._workers[worker_idx], method_name)(*args, **kwargs))
        return self.cluster.workers.call(worker_idx, self._target, method_name, pickle.dumps((args, kwargs)))

    def run_all_workers_single_data(self, method_name: str, *args: object, **kwargs: object) -> list[Future]:
        """Calls the method on every worker with the same arguments."""
        if self._workers:
            return [self.run_single_worker_single_data(method_name, 0, *args, **kwargs)]
        payload, workers = pickle.dumps((args, kwargs)), self.cluster.workers
        return [workers.call(rank, self._target, method_name, payload) for rank in range(self.cluster.world_size())]

    def call_all(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """The values of a call that all workers make together. A failure names the rank, and no rank is left waiting for it."""
        futures = self.run_all_workers_single_data(method_name, *args, **kwargs)
        return get(futures) if self._workers else self.cluster.workers.wait(futures)

    def call_for_one_value(self, method_name: str, *args: object) -> object:
        """The value that all workers must agree on. RuntimeError where one has another."""
        first, *others = self.call_all(method_name, *args)
        for rank, value in enumerate(others, 1):
            if value != first:
                raise RuntimeError(
                    f"rank {rank} has another {args[-1] if args else method_name} than rank 0: {value} against {first}"
                )
        return first

    def call_each(self, method_name: str, each: list[tuple[object, ...]], event: str, on_event: list[Callable[..., None] | None]) -> list[Any]:  # fmt: skip
        """Call a method on every worker with the arguments `each[rank]`, and return the results in rank order. When worker `rank`
        calls its argument named `event`, `on_event[rank]` is called here with the same arguments."""
        workers = self.cluster.workers
        calls = [
            workers.call(rank, self._target, method_name, pickle.dumps((args, {})), None if told is None else event, told)
            for rank, (args, told) in enumerate(zip(each, on_event))
        ]  # fmt: skip
        return workers.wait(calls)

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Calls `cleanup_method` on the workers and lets the objects go. Safe to call twice."""
        if cleanup_method is not None and (self._workers or not self.cluster.in_process):
            self.call_all(cleanup_method)
        self._workers = []
        return True
