"""Chooses how weights reach the engine, with NeMo RL's arguments."""

from typing import Any

from nemo_rl_cpp.compat.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.telemetry.timer import Timer
from nemo_rl_cpp.weight_sync.factory import create_weight_synchronizer as create
from nemo_rl_cpp.weight_sync.shared import SharedWeights

__all__ = ["create_weight_synchronizer"]


class _SharedWeights(SharedWeights, WeightSynchronizer):
    """Shared weights with NeMo RL's calls."""

    @property
    def is_stale(self) -> bool:
        return self._stale

    def sync_weights(self, *, timer: Timer | None = None, kv_scales: dict[str, float] | None = None) -> dict[str, Any]:
        if kv_scales:
            raise ValueError("kv_scales: a float8 cache is not supported")
        return super().sync_weights(timer=timer)


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
    create(policy, generation, generation_backend, colocated)  # says what is not supported
    return _SharedWeights(policy, generation)
