"""The `cluster` section: the number of processes, and which of them train or only generate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, PrivateAttr

from .base import Count, Positive, Section, key

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig


class LauncherVariables(NamedTuple):
    """Names of the environment variables that hold a process's rank and the number of ranks."""

    rank: str
    size: str


def launcher_variables(environment: Mapping[str, str] = os.environ) -> LauncherVariables | None:
    """Return the variables of torchrun, otherwise those of a srun step; None if no launcher started the process. The
    batch script of a Slurm job is not a step."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return LauncherVariables("RANK", "WORLD_SIZE")
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    return LauncherVariables(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks the launcher started; 1 without a launcher."""
    variables = launcher_variables(environment)
    size = "" if variables is None else environment.get(variables.size, "")
    return max(int(size), 1) if size.isdecimal() else 1


class ClusterConfig(Section):
    """The number of devices, and the executor that runs them."""

    _beside_training: bool = PrivateAttr(False)
    gpus_per_node: Positive = key(
        1,
        "devices of a machine; with executor processes or ray that many workers, else they are folded onto the one device at hand, see strict_sizes",
    )
    device: Literal["cpu", "cuda"] = key("cpu", "where models, optimizer and engine lie")
    num_nodes: Positive = key(
        1,
        "machines; with executor processes they count like gpus_per_node, all on this machine; ray: where it has room; else folded",
    )
    strict_sizes: bool = key(
        False,
        "true: device counts and parallel sizes above what runs are errors; false: they are folded onto what runs, with a notice",
    )
    executor: Literal["auto", "in_process", "processes", "ray"] = key(
        "auto",
        "auto: the ranks that torchrun or srun has started, else in_process, since the CPU is one device, or two processes for rollouts beside training (async_grpo), of which one trains and one generates; in_process: everything in this process; processes: gpus_per_node * num_nodes processes of this machine train and generate together, on the CPU; ray: so many Ray actors, on the cluster of RAY_ADDRESS or on one that is started here",
    )
    cpus_per_worker: Positive | None = key(
        None,
        "threads that the run computes on; with executor processes or ray those of each worker (ray: CPUs that it takes of the cluster); null: OMP_NUM_THREADS, or the cores, which workers share equally",
    )
    worker_timeout_s: Annotated[float, Field(gt=0)] = key(
        60.0, "seconds without a sign of life after which a worker process counts as lost, and the run ends"
    )
    max_restarts: Count = key(
        0,
        "how often a run of the run scripts resumes from its newest checkpoint with new workers after one was lost; 0: it ends",
    )
    environment_restarts: Count = key(
        3,
        "with executor ray: how often each Ray actor of an environment is started again after it was lost, and asked again, where the environment allows it (can_be_asked_again); others end the run",
    )
    communication_timeout_s: Annotated[float, Field(gt=0)] = key(
        1800.0,
        "seconds that one message between worker processes may take, waiting for a slower one included; with executor ray also one answer of an environment",
    )

    def note_beside_training(self) -> None:
        """Note that engines generate beside training, so that `auto` takes a process for each of the two."""
        self._beside_training = True

    @property
    def is_split(self) -> bool:
        """Whether `auto` stands for one process that trains and one that generates."""
        return self.executor == "auto" and self._beside_training and launched_ranks() == 1

    @property
    def processes(self) -> int:
        """The number of cooperating processes: the workers of the executors `processes` and `ray`, the launcher's ranks
        with `auto`, otherwise 1; 2 if `is_split`."""
        if self.is_split:
            return 2
        if self.executor == "auto":
            return launched_ranks()
        return self.num_nodes * self.gpus_per_node if self.has_workers else 1

    @property
    def chosen_executor(self) -> Literal["in_process", "processes", "ray"]:
        """The executor, with `auto` resolved."""
        if self.executor == "auto":
            return "processes" if launched_ranks() > 1 or self.is_split else "in_process"
        return self.executor

    @property
    def has_workers(self) -> bool:
        """Whether models live in workers and not in this process."""
        return self.chosen_executor in ("processes", "ray")

    @property
    def executor_text(self) -> str:
        """The executor's name for error messages, with what `auto` stands for."""
        if self.is_split:
            return "auto, which is two processes for rollouts beside training,"
        return (
            f"auto under a launcher of {self.processes} ranks"
            if self.executor == "auto" and self.has_workers
            else self.executor
        )

    @property
    def one_process_text(self) -> str:
        """Advice for messages: how to turn a run with workers into a run of a single process."""
        return "start one process" if self.executor == "auto" else "set it to auto"

    @property
    def has_written_size(self) -> bool:
        """Whether the run uses as many devices as the configuration gives."""
        return self.has_workers and self.processes == self.num_nodes * self.gpus_per_node


def engines_of(config: TrainMasterConfig) -> int:
    """Return how many workers only generate; 0 if generation shares the trainers' processes and weights. With the
    executor `auto`, 1 for rollouts beside training.

    On one machine the number is `resources.gpus_per_node`, on several machines it is the workers of
    `resources.num_nodes` whole machines.
    """
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if cluster.is_split and not colocated.enabled:
        return 1
    if colocated.enabled or not cluster.has_workers or cluster.executor == "auto":  # all ranks of a launcher train
        return 0
    if cluster.num_nodes == 1:
        return colocated.resources.gpus_per_node or 0
    return (colocated.resources.num_nodes or 0) * cluster.gpus_per_node


def trainers_of(config: TrainMasterConfig) -> int:
    """Return the number of processes that train."""
    return config.cluster.processes - engines_of(config)
