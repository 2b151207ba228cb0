"""What all synchronizers share: policy and engine must have the same weights, and nothing may change them unseen."""

from __future__ import annotations

from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer


class CheckedWeights(WeightSynchronizer):
    """Remembers the digest of the weights of the last `sync_weights`, and compares it before training.

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
