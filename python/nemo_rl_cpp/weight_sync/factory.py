"""Chooses how weights reach the engine."""

from typing import Any

from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.weight_sync.shared import SharedWeights


def create_weight_synchronizer(
    policy: Any,
    generation: Any,
    generation_backend: str,
    colocated: bool,
    train_cluster: Any = None,
    inference_cluster: Any = None,
    refit_buffer_size_gb: float | int | None = None,
) -> WeightSynchronizer:
    """The synchronizer for an engine of `generation_backend`. Shared weights need neither clusters nor a buffer.

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
