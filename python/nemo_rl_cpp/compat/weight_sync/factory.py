"""Chooses how weights reach the engine, with NeMo RL's arguments."""

from itertools import count
from typing import Any

from nemo_rl_cpp.compat.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.telemetry.timer import Timer
from nemo_rl_cpp.weight_sync import CheckedWeights, CollectiveWeights, SharedWeights
from nemo_rl_cpp.weight_sync import create_weight_synchronizer as create


class _NemoCalls(CheckedWeights, WeightSynchronizer):
    """NeMo RL's calls."""

    @property
    def is_stale(self) -> bool:
        return self._stale

    def sync_weights(self, *, timer: Timer | None = None, kv_scales: dict[str, float] | None = None) -> dict[str, Any]:
        if kv_scales:
            raise ValueError("kv_scales: a float8 cache is not supported")
        return super().sync_weights(timer=timer)


class _SharedWeights(_NemoCalls, SharedWeights): ...


class _CollectiveWeights(_NemoCalls, CollectiveWeights): ...


def create_weight_synchronizer(
    policy: Any,
    generation: Any,
    generation_backend: str,
    colocated: bool,
    train_cluster: Any = None,
    inference_cluster: Any = None,
    refit_buffer_size_gb: float | int | None = None,
) -> WeightSynchronizer:
    """The synchronizer for an engine of `generation_backend`. Policy and engines know their clusters, and `policy.refit_buffer_size_gb` is
    the policy's.

    ValueError for what no synchronizer can bring together.
    """
    made = create(policy, generation, generation_backend, colocated)  # says what is not supported
    if isinstance(made, SharedWeights):
        return _SharedWeights(policy, generation)
    versions = count()
    return _CollectiveWeights(policy, generation, lambda: next(versions))
