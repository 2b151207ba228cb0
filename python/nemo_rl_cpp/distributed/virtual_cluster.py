"""The devices of a run. In this process there is one; `cluster.executor: in_process` needs no Ray."""

import os
import socket
from typing import Any

from nemo_rl_cpp.config.cluster import ClusterConfig

__all__ = ["ClusterConfig", "RayVirtualCluster", "check_device", "cuda_usable", "init_ray"]


def init_ray(log_dir: str | None = None) -> None:
    """Starts what workers need to be started with. The in-process executor starts none, so there is nothing to do."""


def cuda_usable() -> bool:
    """Whether models can lie on a GPU: torch sees one and this package was built with its CUDA kernels."""
    import importlib.util

    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None


def check_device(device: str) -> str:
    """`cluster.device` as it is. Raises ValueError, which says why, where it asks for a GPU that cannot be used."""
    if device == "cuda" and not cuda_usable():
        raise ValueError(f"cluster.device is cuda, but {_why_no_cuda()}, or set cluster.device=cpu")
    return device


def _why_no_cuda() -> str:
    """What is missing for a GPU, and what to do."""
    import torch

    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA: install a torch with CUDA"
        return "torch sees no GPU: run on a machine with one (nvidia-smi lists them)"
    return "this package was built without its CUDA kernels: build it with NEMO_RL_CUDA=on"


class RayVirtualCluster:
    """One device, seen as a cluster of one node with one worker. Names and arguments are NeMo RL's.

    Raises ValueError for more than one worker, which would need one process a device.
    """

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
        workers = sum(bundle_ct_per_node_list)
        if workers != 1:
            raise ValueError(
                f"a cluster of {workers} workers ({bundle_ct_per_node_list} a node) was asked for, but the in-process "
                "executor drives one device: set cluster.gpus_per_node=1 and cluster.num_nodes=1"
            )
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self._ports = (port_range_low or 0, port_range_high or 0)

    def get_placement_groups(self) -> list[Any]:
        """No reservations: the one worker is this process."""
        return []

    def world_size(self) -> int:
        """Number of workers: 1."""
        return 1

    def device(self, precision: str = "float32") -> str:
        """Where models lie: "cuda" when the cluster uses GPUs, one can be used and `precision` is computed there (float32,
        bfloat16); else "cpu". CUDA_VISIBLE_DEVICES hides GPUs."""
        return "cuda" if self.use_gpus and precision in ("float32", "bfloat16") and cuda_usable() else "cpu"

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

    def shutdown(self) -> bool:
        """Nothing was started. Safe to call twice."""
        return True
