"""Chooses how weights reach the engine."""

from collections.abc import Callable

from nemo_rl_cpp.models.distributed_models import DistributedPolicy
from nemo_rl_cpp.models.generation.dedicated import DedicatedGeneration
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.generation.vllm.vllm_engine import VllmEngine
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.weight_sync.collective import CollectiveWeights
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.weight_sync.shared import SharedWeights
from nemo_rl_cpp.weight_sync.shared_memory import SharedMemoryWeights


def create_weight_synchronizer(
    policy: PolicyInterface, generation: GenerationInterface, generation_backend: str, colocated: bool,
    version: Callable[[], int] | None = None,
) -> WeightSynchronizer:  # fmt: skip
    """The synchronizer for an engine of `generation_backend`: on the policy's own weights where `colocated`, else with weights of
    its own (`DistributedPolicy` and `DedicatedGeneration`), whose present ones `version` numbers. A `VllmEngine` always has weights
    of its own.

    ValueError for what no synchronizer can bring together.
    """
    if isinstance(generation, VllmEngine):
        return SharedMemoryWeights(policy, generation, version or (lambda: 0))
    if generation_backend != "native":
        raise ValueError(f"policy.generation.backend={generation_backend!r} has weights of its own, and bringing them there is "
                         "not supported yet: set policy.generation.backend=native")  # fmt: skip
    if colocated:
        return SharedWeights(policy, generation)
    if not isinstance(policy, DistributedPolicy) or not isinstance(generation, DedicatedGeneration):
        raise ValueError(
            "policy.generation.colocated.enabled=false needs a policy and engines in workers of their own (cluster.executor processes or "
            f"ray), not {type(policy).__name__} and {type(generation).__name__}"
        )
    return CollectiveWeights(policy, generation, version or (lambda: 0))
