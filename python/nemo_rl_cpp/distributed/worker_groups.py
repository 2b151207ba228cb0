"""The workers behind a policy or an engine. In this process there is one, called directly: no pickling, no copies."""

from collections.abc import Callable
from typing import Any

from nemo_rl_cpp.distributed.futures import Future, get
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster


class RayWorkerGroup:
    """The workers of a cluster under one handle; methods run on all of them. Names are NeMo RL's.

    Results come as futures that hold their value already; `nemo_rl_cpp.distributed.get` unwraps them.
    """

    def __init__(
        self, cluster: RayVirtualCluster, remote_worker_builder: Callable[[], Any], name_prefix: str = ""
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix
        self._workers = [remote_worker_builder() for _ in range(cluster.world_size())]

    @property
    def workers(self) -> list[Any]:
        """The worker objects."""
        return self._workers

    @property
    def dp_size(self) -> int:
        """Number of data-parallel workers."""
        return len(self._workers)

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> Future:
        """Calls the method on one worker."""
        return Future.completed(getattr(self._workers[worker_idx], method_name)(*args, **kwargs))

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future]:
        """Calls the method on every worker with the same arguments."""
        return [self.run_single_worker_single_data(method_name, i, *args, **kwargs) for i in range(self.dp_size)]

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Calls `cleanup_method` on the workers and lets them go. Safe to call twice."""
        if cleanup_method is not None:
            get(self.run_all_workers_single_data(cleanup_method))
        self._workers = []
        return True
