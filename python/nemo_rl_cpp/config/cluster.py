"""The `cluster` section: how many processes a run has, and which of them train or only generate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, PrivateAttr

from .base import Count, Positive, Section, key

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig


class LauncherVariables(NamedTuple):
    """Names of the environment variables in which a launcher passes the rank of a process and the number of ranks."""

    rank: str
    size: str


def launcher_variables(environment: Mapping[str, str] = os.environ) -> LauncherVariables | None:
    """Return the names of torchrun's variables if they are set, otherwise of those of a Slurm step (srun). Return None
    if no launcher started this process. The batch script of a Slurm job is not a launcher."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return LauncherVariables("RANK", "WORLD_SIZE")
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return LauncherVariables("SLURM_PROCID", size)


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    variables = launcher_variables(environment)
    size = "" if variables is None else environment.get(variables.size, "")
    return max(int(size), 1) if size.isdecimal() else 1


class ClusterConfig(Section):
    """Settings of the devices and processes of a run."""

    _beside_training: bool = PrivateAttr(False)
    gpus_per_node: Positive = 1
    """Number of devices per machine. With executor processes or ray, it is the number of workers per machine. Otherwise
    the run uses a single device, see strict_sizes."""
    device: Literal["cpu", "cuda"] = key("cpu", "Device of the models, the optimizer and the generation engine.")
    num_nodes: Positive = 1
    """Number of machines. The number of workers is num_nodes * gpus_per_node. With executor processes all of them run
    on this machine; Ray places them where the cluster has room. Otherwise the run uses a single device, see
    strict_sizes."""
    strict_sizes: bool = False
    """What happens if the configuration asks for more devices or larger parallel sizes than the run has. true: an
    error. false: the run uses the devices that it has, and prints a notice."""
    executor: Literal["auto", "in_process", "processes", "ray"] = "auto"
    """Processes that train and generate. in_process: this process. processes: gpus_per_node * num_nodes processes on
    this machine. ray: as many Ray actors, on the cluster of RAY_ADDRESS or on a new local one. auto: the
    ranks that torchrun or srun has started; without a launcher in_process, or two processes (one trains, one generates)
    for rollouts that overlap with training (async_grpo, async_ppo)."""
    cpus_per_worker: Positive | None = None
    """Number of CPU threads of the run; with executor processes or ray, of each worker. Ray also reserves this number
    of CPUs per worker. null: OMP_NUM_THREADS or the number of cores, divided equally among the workers."""
    worker_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without a heartbeat after which a worker counts as lost and the run ends."""
    max_restarts: Count = 0
    """How often `nemo-rl-cpp train` or a script of `examples/` may resume the run from its newest checkpoint, with new
    workers, after a worker was lost. 0: the run ends instead."""
    environment_restarts: Count = 3
    """With executor ray: how often each Ray actor of an environment may be restarted after it was lost. The call is
    then repeated. Only environments whose class sets can_be_asked_again are restarted; the loss of any other ends the
    run."""
    communication_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Timeout in seconds of a message between workers, and with executor ray of a call to an environment."""

    def note_beside_training(self) -> None:
        """Record that rollouts overlap with training: `auto` then starts one process to train and one to generate."""
        self._beside_training = True

    @property
    def is_split(self) -> bool:
        """Whether the executor `auto` starts two processes, one that trains and one that generates."""
        return self.executor == "auto" and self._beside_training and launched_ranks() == 1

    @property
    def processes(self) -> int:
        """The number of processes of the run. For the executors `processes` and `ray`: the number of workers. For
        `auto`: the launcher's ranks, or 2 if `is_split`. Otherwise 1."""
        if self.is_split:
            return 2
        if self.executor == "auto":
            return launched_ranks()
        return self.num_nodes * self.gpus_per_node if self.has_workers else 1

    @property
    def chosen_executor(self) -> Literal["in_process", "processes", "ray"]:
        """The executor; if it is `auto`, the one that `auto` selects."""
        if self.executor == "auto":
            return "processes" if launched_ranks() > 1 or self.is_split else "in_process"
        return self.executor

    @property
    def has_workers(self) -> bool:
        """Whether the models are in worker processes and not in this process."""
        return self.chosen_executor in ("processes", "ray")

    @property
    def executor_text(self) -> str:
        """The executor's name for error messages; for `auto` with an explanation."""
        if self.is_split:
            return "auto, which is two processes for rollouts beside training,"
        if self.executor == "auto" and self.has_workers:
            return f"auto under a launcher of {self.processes} ranks"
        return self.executor

    @property
    def one_process_text(self) -> str:
        """The end of an error message that says how to run in one process, without workers."""
        return "start one process" if self.executor == "auto" else "set it to auto"

    @property
    def has_written_size(self) -> bool:
        """Whether the run has as many workers as its configuration asks for: `num_nodes * gpus_per_node`."""
        return self.has_workers and self.processes == self.num_nodes * self.gpus_per_node


def engines_of(config: TrainMasterConfig) -> int:
    """Return the number of workers that only generate, as `colocated.resources` sets it (1 if the executor `auto`
    starts two processes); 0 if the training processes also generate, with their own weights."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if cluster.is_split and not colocated.enabled:
        return 1
    if colocated.enabled or not cluster.has_workers or cluster.executor == "auto":  # all ranks of a launcher train
        return 0
    if cluster.num_nodes == 1:
        return colocated.resources.gpus_per_node or 0
    return (colocated.resources.num_nodes or 0) * cluster.gpus_per_node


def trainers_of(config: TrainMasterConfig) -> int:
    """Return the number of processes of the run that train (the others only generate)."""
    return config.cluster.processes - engines_of(config)
