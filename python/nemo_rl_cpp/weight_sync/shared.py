"""Colocated refit: the engine reads the trainer's own weights, so nothing is copied, only checked."""

from __future__ import annotations

from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.telemetry.timer import Timer
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer


class SharedWeights(WeightSynchronizer):
    """Weights that policy and engine both read from one storage.

    `sync_weights` takes the digest of the weights as each role sees them and stops the run when they differ;
    `verify_before_training` does so again with the digest under which the rollouts were generated, so that nothing
    changes the weights between the two phases unseen.

    With `check_digests` off only the counters remain.
    """

    def __init__(self, policy: PolicyInterface, generation: GenerationInterface, check_digests: bool = True) -> None:
        self._policy = policy
        self._generation = generation
        self._check = check_digests
        self._digest: str | None = None
        self._stale = True

    def mark_stale(self) -> None:
        """The policy has been trained."""
        self._stale = True

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """`refit/bytes` (0: nothing moved) and `weights/digest`, the same for both roles.

        RuntimeError when the engine would generate with other weights than those in training.
        """
        if self._stale:
            self._generation.invalidate_kv_cache()
            self._digest = self._compare("the engine's weights are not the policy's")
            self._stale = False
        return {"refit/bytes": 0, "weights/digest": self._digest}

    def verify_before_training(self) -> None:
        """RuntimeError when the weights are not those under which the rollouts were generated."""
        if not self._check or self._stale:
            return
        now = self._policy.weight_digest()
        if now != self._digest:
            raise RuntimeError(
                f"the weights have changed between generation (digest {self._digest}) and training (digest {now}): "
                "something wrote into them, or memory is damaged. The last checkpoint is not affected."
            )

    def _compare(self, problem: str) -> str | None:
        if not self._check:
            return None
        ours, theirs = self._policy.weight_digest(), self._generation.weight_digest()
        if ours != theirs:
            raise RuntimeError(f"{problem}: digest {theirs} against {ours}")
        return ours
