"""Which of the cluster's workers train and which only generate (`policy.generation.colocated`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Report

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"


def engines_of(config: TrainMasterConfig) -> int:
    """How many workers only generate; 0 where generation shares the trainers' processes and weights.

    They are taken out of the cluster's: on one machine `resources.gpus_per_node` of its workers, on several machines
    `resources.num_nodes` whole machines.
    """
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled or not cluster.has_workers or cluster.executor == "auto":  # a launcher's ranks all train
        return 0
    if cluster.num_nodes == 1:
        return colocated.resources.gpus_per_node or 0
    return (colocated.resources.num_nodes or 0) * cluster.gpus_per_node


def trainers_of(config: TrainMasterConfig) -> int:
    """How many processes train together."""
    return config.cluster.processes - engines_of(config)


def check_resources(config: TrainMasterConfig, report: Report) -> None:
    """Engines with workers of their own need workers, and leave some for training."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.colocated.enabled:
        return
    if cluster.executor == "in_process":
        report.add(
            f"{_COLOCATED}.enabled",
            "is false, which gives generation processes of its own, and cluster.executor is in_process: set it to processes or ray, or "
            "enabled to true",
            "cluster.executor",
        )
    if not cluster.has_workers or cluster.executor == "auto":  # folded, and said
        return
    if _leaves_nothing(config, report):
        report.add(
            _RESOURCES,
            f"takes {engines_of(config)} of the cluster's {cluster.processes} workers (num_nodes * gpus_per_node), which leaves none for "
            "training: take fewer, or raise the cluster's",
            "cluster.gpus_per_node",
        )
    if (slices := config.policy.tensor_parallel(max(trainers_of(config), 1))) > 1:
        report.add(
            config.policy.tensor_parallel_key("policy"),
            f"is {slices}, but engines with processes of their own have whole models, which trainers with slices do not send: set it to 1, or "
            f"{_COLOCATED}.enabled to true",
            f"{_COLOCATED}.enabled",
        )
    if config.policy.kept_activations_gb:
        report.add(
            "policy.kept_activations_gb",
            f"is {config.policy.kept_activations_gb:g}, but engines with processes of their own keep no activations for training: set it to "
            "0 or null",
            f"{_COLOCATED}.enabled",
        )


def _leaves_nothing(config: TrainMasterConfig, report: Report) -> bool:
    """Whether the sizes are there, but leave nothing for training. On one machine its workers are counted, on several whole ones."""
    resources, cluster = config.policy.generation.colocated.resources, config.cluster
    own, unit = ("gpus_per_node", "workers") if cluster.num_nodes == 1 else ("num_nodes", "nodes")
    wanted, there = getattr(resources, own), getattr(cluster, own)
    if wanted is None:
        report.add(
            f"{_RESOURCES}.{own}", f"is missing: of the {there} {unit} (cluster.{own}) say how many only generate"
        )
    elif cluster.num_nodes == 1 and resources.num_nodes not in (None, 1):
        report.add(
            f"{_RESOURCES}.num_nodes",
            f"is {resources.num_nodes}, and the cluster has one node: set it to 1 or null",
            "cluster.num_nodes",
        )
    elif cluster.num_nodes > 1 and resources.gpus_per_node not in (None, cluster.gpus_per_node):
        report.add(
            f"{_RESOURCES}.gpus_per_node",
            f"is {resources.gpus_per_node}, but of several nodes generation takes whole ones, of {cluster.gpus_per_node} workers: set it to "
            "that or null",
            "cluster.gpus_per_node",
        )
    else:
        return wanted >= there
    return False
