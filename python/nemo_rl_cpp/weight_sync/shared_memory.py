"""Refit of an engine in another process of this machine that has another torch: through shared memory (vLLM)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nemo_rl_cpp.weight_sync.checked import CheckedWeights

if TYPE_CHECKING:
    from nemo_rl_cpp.models.generation.vllm.vllm_generation import VllmGeneration, WeightsOwner
    from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
    from nemo_rl_cpp.telemetry.timer import Timer


class SharedMemoryWeights(CheckedWeights):
    """Weights that are copied into memory which both processes map; the engine loads them from there.

    The trainer takes a digest of its own weights, the engine of what it finds in the memory. Where they differ, or where a parameter
    of the engine's got nothing, the run stops.

    Args:
        version: gives the number of the present weights, which the engine stamps on its responses.
    """

    _generation: VllmGeneration

    def __init__(
        self, policy: PolicyInterface, generation: VllmGeneration, version: Callable[[], int], check_digests: bool = True
    ) -> None:  # fmt: skip
        super().__init__(policy, generation, check_digests)
        self._version = version
        self._metrics: dict[str, float | str | None] = {}

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """`refit/bytes`, `refit/seconds` (digests included), `refit/gb_per_s`, `refit/version`, `refit/digest` (of what arrived, equal
        to that of what was sent), and `weights/digest`, the policy's own; those of the last refit where the engine's weights are the
        present ones."""
        if self._stale:
            with timer("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
                self._refit()
            self._stale = False
        return dict(self._metrics)

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
