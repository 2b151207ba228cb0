"""The devices of a run, and the processes that drive them."""

import os

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.launch import launched
from nemo_rl_cpp.distributed.process_workers import LaunchedWorkers, ProcessWorkers
from nemo_rl_cpp.distributed.worker_calls import Workers


def cuda_usable() -> bool:
    """Whether models can lie on a GPU: torch sees one and this package was built with its CUDA kernels."""
    import importlib.util

    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None


def check_device(device: str) -> str:
    """Return `cluster.device`. Raise ValueError with the reason if it is `cuda` and no GPU can be used."""
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
    return "this package was built without its CUDA kernels: build it with NEMO_RL_CUDA=on (in a source tree: NEMO_RL_CUDA=on uv sync)"


def use_threads(settings: ClusterConfig) -> None:
    """Lets this process compute on `cluster.cpus_per_worker` threads, where models live in it and the key is given."""
    import torch

    if settings.cpus_per_worker is not None and not settings.has_workers:
        torch.set_num_threads(settings.cpus_per_worker)


def shut_down(*clusters: "RayVirtualCluster | None") -> None:
    """Ends the processes of those that there are."""
    for cluster in clusters:
        if cluster is not None:
            cluster.shutdown()


class RayVirtualCluster:
    """The workers of a run, one a device. One worker is this process itself; more are processes of this machine, or Ray actors
    (`cluster.executor`), on the CPU.

    Args:
        bundle_ct_per_node_list: workers of each node.
        use_gpus: whether models lie on a GPU.
        settings: section `cluster` of the configuration: who runs the workers, their threads and deadlines.
        role: what messages call a worker.

    Raises ValueError for several workers on GPUs or with the executor in_process.
    """

    def __init__(
        self, bundle_ct_per_node_list: list[int], use_gpus: bool = True, name: str = "", settings: ClusterConfig | None = None,
        role: str = "rank",
    ) -> None:  # fmt: skip
        self._size, self._settings, self._role = sum(bundle_ct_per_node_list), settings or ClusterConfig(), role
        if self._size < 1:
            raise ValueError(
                f"a cluster needs at least one worker, got {bundle_ct_per_node_list} a node: set cluster.gpus_per_node=1 and cluster.num_nodes=1"
            )
        if self._size > 1 and self._settings.executor == "in_process":
            raise ValueError(
                f"cluster.executor is in_process, which is one worker, not {self._size}: set it to processes or ray"
            )
        self.in_process = self._size == 1 and not self._settings.has_workers
        if not self.in_process and use_gpus:
            raise ValueError(
                f"a cluster of {self._size} GPU workers ({bundle_ct_per_node_list} a node) was asked for. NCCL connects several GPUs, but no "
                "training on several has been tried yet, so a run is refused: set cluster.device=cpu for several processes, or "
                "cluster.gpus_per_node=1 and cluster.num_nodes=1 for one GPU"
            )
        self.use_gpus = use_gpus
        self.name = name
        self._workers: Workers | None = None

    def world_size(self) -> int:
        """Number of workers."""
        return self._size

    @property
    def workers(self) -> "Workers":
        """The workers that are not this process; started when they are first asked for."""
        if self._workers is None:
            import torch

            settings = self._settings
            everybody = max(self._size, settings.processes)  # another cluster's workers share this machine's threads
            by_launcher = launched() is not None and settings.chosen_executor == "processes"
            if by_launcher:  # whose threads are those of one rank
                everybody = 1
            threads = settings.cpus_per_worker or max(1, torch.get_num_threads() // everybody)
            common = (self._size, threads, settings.worker_timeout_s, settings.communication_timeout_s, self._role)
            backend = "nccl" if self.use_gpus else "gloo"
            if settings.executor == "ray":
                from nemo_rl_cpp.distributed.ray_workers import RayWorkers

                self._workers = RayWorkers(*common, all_workers=everybody, backend=backend)
            elif by_launcher:
                self._workers = LaunchedWorkers(*common)
            else:
                self._workers = ProcessWorkers(*common, backend=backend)
        return self._workers

    @property
    def deadline(self) -> float:
        """Seconds that one message between workers may take."""
        return self._settings.communication_timeout_s

    def device(self, precision: str = "float32") -> str:
        """Where models lie: "cuda" when the cluster uses GPUs, one can be used and `precision` is computed there (float32,
        bfloat16); else "cpu". CUDA_VISIBLE_DEVICES hides GPUs."""
        return "cuda" if self.use_gpus and precision in ("float32", "bfloat16") and cuda_usable() else "cpu"

    def shutdown(self) -> bool:
        """Ends the processes, if there are any. Safe to call twice."""
        if self._workers is not None:
            self._workers.kill()
        return True
