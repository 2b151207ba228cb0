"""The devices of a run. In this process there is one; `cluster.executor: in_process` needs no Ray."""

import os

from nemo_rl_cpp.config.cluster import ClusterConfig

__all__ = ["ClusterConfig", "RayVirtualCluster", "check_device", "cuda_usable"]


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
    """One device, seen as a cluster of one node with one worker.

    Raises ValueError for more than one worker, which would need one process a device.
    """

    def __init__(self, bundle_ct_per_node_list: list[int], use_gpus: bool = True, name: str = "") -> None:
        workers = sum(bundle_ct_per_node_list)
        if workers != 1:
            raise ValueError(
                f"a cluster of {workers} workers ({bundle_ct_per_node_list} a node) was asked for, but the in-process "
                "executor drives one device: set cluster.gpus_per_node=1 and cluster.num_nodes=1"
            )
        self.use_gpus = use_gpus
        self.name = name

    def world_size(self) -> int:
        """Number of workers: 1."""
        return 1

    def device(self, precision: str = "float32") -> str:
        """Where models lie: "cuda" when the cluster uses GPUs, one can be used and `precision` is computed there (float32,
        bfloat16); else "cpu". CUDA_VISIBLE_DEVICES hides GPUs."""
        return "cuda" if self.use_gpus and precision in ("float32", "bfloat16") and cuda_usable() else "cpu"

    def shutdown(self) -> bool:
        """Nothing was started. Safe to call twice."""
        return True
