"""The devices of a run, the processes that use them, and the Python objects in these processes."""

import importlib.util
import os
import pickle
from collections.abc import Callable
from itertools import count

import torch

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.launch import LaunchedWorkers, ProcessWorkers, launched, visible_gpus
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.distributed.ray_workers import RayWorkers
from nemo_rl_cpp.distributed.worker_calls import WorkerCall, Workers

_TARGETS = count(1)  # numbers for the objects in worker processes, unique over all groups


def cuda_usable() -> bool:
    """Return whether models can run on a GPU: torch sees a GPU and this package was built with its CUDA kernels."""
    return torch.cuda.is_available() and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None


def check_device(device: str, name: str = "cluster.device") -> str:
    """Return `device`, the value of `name`. Raise ValueError with the reason if it is `cuda` and no GPU can be used."""
    if device != "cuda" or cuda_usable():
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        why = "this package was built without its CUDA kernels: build it with NEMO_RL_CUDA=on (in a source tree: NEMO_RL_CUDA=on uv sync)"
    elif hidden is not None and hidden.strip() in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it"
    elif torch.version.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA: install a torch with CUDA"
    else:
        why = "torch sees no GPU: run on a machine with one (nvidia-smi lists them)"
    raise ValueError(f"{name} is cuda, but {why}, or set it to cpu")


def device_for(device: str, precision: str) -> str:
    """Return the device of a model in `precision`: `device`, or the CPU for float64, which GPU kernels do not have."""
    return device if precision in ("float32", "bfloat16") else "cpu"


def use_threads(settings: ClusterConfig) -> None:
    """Set torch's number of threads to `cluster.cpus_per_worker`, if the key is set and models run in this process."""
    if settings.cpus_per_worker is not None and not settings.has_workers:
        torch.set_num_threads(settings.cpus_per_worker)


def shut_down(*clusters: "Cluster | None") -> None:
    for cluster in clusters:
        if cluster is not None:
            cluster.shutdown()


class Cluster:
    """The workers of a run, one per device: this process itself, processes on this machine, or Ray actors (as
    `cluster.executor` sets). `bundle_ct_per_node_list` has the number of workers on each node, `settings` is the
    configuration section `cluster`, and `role` the word for a worker in messages. Worker i on this machine gets its
    GPU number `first_gpu` + i, modulo their number, and sees no other."""

    def __init__(
        self, bundle_ct_per_node_list: list[int], use_gpus: bool = True, name: str = "", settings: ClusterConfig | None = None,
        role: str = "rank", first_gpu: int = 0,
    ) -> None:  # fmt: skip
        self._size, self._settings, self._role = sum(bundle_ct_per_node_list), settings or ClusterConfig(), role
        self.in_process = self._size == 1 and not self._settings.has_workers
        self.use_gpus, self._first_gpu = use_gpus, first_gpu
        self.name = name
        self.deadline = self._settings.communication_timeout_s  # timeout of one message between workers, in seconds
        self._workers: Workers | None = None

    def world_size(self) -> int:
        return self._size

    @property
    def workers(self) -> Workers:
        """The workers outside this process. The first access starts them."""
        if self._workers is None:
            settings = self._settings
            by_launcher = launched() is not None and settings.chosen_executor == "processes"
            # use as many threads as one rank has, or as all workers on this machine have, also those of another cluster
            everybody = 1 if by_launcher else max(self._size, settings.processes)
            threads = settings.cpus_per_worker or max(1, torch.get_num_threads() // everybody)
            common = (self._size, threads, settings.worker_timeout_s, self.deadline, self._role)
            if settings.executor == "ray":
                self._workers = RayWorkers(*common, all_workers=everybody, use_gpus=self.use_gpus)
            else:
                gpus = visible_gpus() if self.use_gpus else []
                own = [gpus[(self._first_gpu + i) % len(gpus)] for i in range(self._size if gpus else 0)]
                self._workers = (LaunchedWorkers if by_launcher else ProcessWorkers)(*common, gpus=own)
        return self._workers

    def device(self, precision: str = "float32") -> str:
        """Return "cuda" if `use_gpus`, a GPU can be used, and `precision` is float32 or bfloat16; otherwise "cpu"."""
        return device_for("cuda" if self.use_gpus and cuda_usable() else "cpu", precision)

    def shutdown(self) -> bool:
        """Shut down the worker processes, if any. Further calls do nothing."""
        if self._workers is not None:
            self._workers.kill()
        return True


class WorkerGroup:
    """A set of objects, one in each worker of a cluster, whose methods are called on all workers.
    `remote_worker_builder`, called in each worker with the worker's `Ranks`, returns that worker's object. Builder,
    arguments and results are pickled. `tensor_size` tensor-parallel ranks hold slices of one model and process the same
    samples. Several groups may share the workers."""

    def __init__(
        self, cluster: Cluster, remote_worker_builder: Callable[[Ranks], object], tensor_size: int = 1
    ) -> None:
        self.cluster = cluster
        self.tensor_size = tensor_size
        self.dp_size = cluster.world_size() // tensor_size  # number of data-parallel workers or groups
        self._target = next(_TARGETS)
        self.call_all("__create__", remote_worker_builder)

    def first_of_groups(self, values: list) -> list:
        """Return, of `values` (one per worker), the value of the first worker of each tensor-parallel group. The other
        workers of a group have the same value."""
        return values[:: self.tensor_size]

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: object) -> WorkerCall:
        """Start a call of `method_name` on worker `worker_idx`. Return the call, whose `result` waits for the value."""
        return self.cluster.workers.call(worker_idx, self._target, method_name, pickle.dumps((args, {})))

    def run_all_workers_single_data(self, method_name: str, *args: object, **kwargs: object) -> list[WorkerCall]:
        """Start `method_name` with the same arguments on every worker, and return a call with a `result` for each."""
        payload, workers = pickle.dumps((args, kwargs)), self.cluster.workers
        return [workers.call(rank, self._target, method_name, payload) for rank in range(self.cluster.world_size())]

    def call_all(self, method_name: str, *args: object, **kwargs: object) -> list:
        """Call a method on all workers concurrently; return the results by rank. An error names the failed rank."""
        return self.cluster.workers.wait(self.run_all_workers_single_data(method_name, *args, **kwargs))

    def call_for_one_value(self, method_name: str, *args: object) -> object:
        """Call a method on all workers and return their common result. Raise RuntimeError if the results differ."""
        first, *others = self.call_all(method_name, *args)
        for rank, value in enumerate(others, 1):
            if value != first:
                what = args[-1] if args else method_name
                raise RuntimeError(f"rank {rank} has another {what} than rank 0: {value} against {first}")
        return first

    def call_each(
        self, method_name: str, each: list[tuple], event: str, on_event: list[Callable[..., None] | None]
    ) -> list:
        """Call a method on every worker with the arguments `each[rank]`, and return the results in rank order. The
        method also gets a callback as its argument named `event`; when worker `rank` calls it, `on_event[rank]` runs in
        this process."""
        calls = []
        for rank, (args, told) in enumerate(zip(each, on_event)):
            listener = None if told is None else (event, told)
            payload = pickle.dumps((args, {}))
            calls.append(self.cluster.workers.call(rank, self._target, method_name, payload, listener))
        return self.cluster.workers.wait(calls)
