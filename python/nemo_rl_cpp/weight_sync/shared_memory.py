"""Refit of an engine in another process of this machine that has another torch: through shared memory (vLLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_cpp.weight_sync.checked import SentWeights

if TYPE_CHECKING:
    from nemo_rl_cpp.models.generation.vllm.vllm_engine import VllmEngine, WeightsOwner


class SharedMemoryWeights(SentWeights):
    """Weights that are copied into memory which both processes map; the engine loads them from there.

    The trainer takes a digest of its own weights, the engine of what it finds in the memory. Where they differ, or where a parameter
    of the engine's got nothing, the run stops. `refit/digest`, of what arrived, is logged beside the metrics of `SentWeights`.
    """

    _generation: VllmEngine

    def _refit(self) -> None:
        owner: WeightsOwner = self._policy
        version = self._version()
        moved = self._generation.update_weights(owner.state_dict(), version)
        self._digest = self._policy.weight_digest() if self._check else None
        self._metrics = {
            "refit/bytes": moved.bytes, "refit/seconds": moved.seconds, "refit/gb_per_s": moved.bytes / moved.seconds / 1e9,
            "refit/version": version, "refit/digest": moved.digest, "weights/digest": self._digest,
        }  # fmt: skip


__all__ = ["SharedMemoryWeights"]
