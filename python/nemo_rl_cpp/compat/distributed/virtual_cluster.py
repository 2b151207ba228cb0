"""NeMo RL's cluster: the house's one device, with the calls by which workers on several nodes would meet."""

import socket
from typing import Any

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed import virtual_cluster as house


def init_ray(log_dir: str | None = None) -> None:
    """Starts what workers need to be started with. The in-process executor starts none, so there is nothing to do."""


class RayVirtualCluster(house.RayVirtualCluster):
    """One device, seen as a cluster of one node with one worker. Ports are searched within [port_range_low, port_range_high)."""

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        port_range_low: int | None = None,
        port_range_high: int | None = None,
        segment_size: int | None = None,
        node_resource_constraints: list[dict[str, float]] | None = None,
    ) -> None:
        super().__init__(bundle_ct_per_node_list, use_gpus, name)
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self._ports = (port_range_low or 0, port_range_high or 0)

    def get_placement_groups(self) -> list[Any]:
        """No reservations: the one worker is this process."""
        return []

    def node_count(self) -> int:
        """Number of nodes: 1."""
        return 1

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """This machine's loopback address and a free port, within the range given at construction."""
        low, high = self._ports
        for port in range(low, high) if high > low else (0,):
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return "127.0.0.1", probe.getsockname()[1]
        raise RuntimeError(f"no port is free between {low} and {high}: widen cluster.master_port_range_*")

    def get_available_addresses_and_ports_batch(
        self, pg_bundle_pairs: list[tuple[int, int]], batch_size: int = 256
    ) -> list[tuple[str, int]]:
        """An address and port for each pair."""
        return [self.get_available_address_and_port(*pair) for pair in pg_bundle_pairs]

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address and port where the workers meet."""
        return self.get_available_address_and_port(0, 0)
