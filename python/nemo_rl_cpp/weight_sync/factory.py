"""Chooses how weights reach the engine."""

from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.weight_sync.shared import SharedWeights


def create_weight_synchronizer(
    policy: PolicyInterface, generation: GenerationInterface, generation_backend: str, colocated: bool
) -> WeightSynchronizer:
    """The synchronizer for an engine of `generation_backend`.

    ValueError for an engine that has weights of its own, which is not supported yet.
    """
    if not colocated:
        raise ValueError(
            "policy.generation.colocated.enabled=false is not supported yet: generation shares the trainer's weights"
        )
    if generation_backend != "native":
        raise ValueError(f"policy.generation.backend={generation_backend!r} has weights of its own, and bringing them there is "
                         "not supported yet: set policy.generation.backend=native")  # fmt: skip
    return SharedWeights(policy, generation)
