"""Colocated refit: the engine reads the trainer's own weights, so nothing is copied, only checked."""

from __future__ import annotations

from nemo_rl_cpp.telemetry.timer import Timer
from nemo_rl_cpp.weight_sync.checked import CheckedWeights


class SharedWeights(CheckedWeights):
    """Weights that policy and engine both read from one storage.

    `sync_weights` takes the digest of the weights as each role sees them and stops the run when they differ;
    `verify_before_training` does so again with the digest under which the rollouts were generated, so that nothing
    changes the weights between the two phases unseen.

    With `check_digests` off only the counters remain.
    """

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """`refit/bytes` (0: nothing moved) and `weights/digest`, the same for both roles.

        RuntimeError when the engine would generate with other weights than those in training.
        """
        if self._stale:
            self._generation.invalidate_kv_cache()
            self._digest = self._compare("the engine's weights are not the policy's")
            self._stale = False
        return {"refit/bytes": 0, "weights/digest": self._digest}

    def _compare(self, problem: str) -> str | None:
        if not self._check:
            return None
        ours, theirs = self._policy.weight_digest(), self._generation.weight_digest()
        if ours != theirs:
            raise RuntimeError(f"{problem}: digest {theirs} against {ours}")
        return ours
