"""What all synchronizers share: policy and engine must have the same weights, and nothing may change them unseen."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer

if TYPE_CHECKING:
    from nemo_rl_cpp.telemetry.timer import Timer


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


class SentWeights(CheckedWeights, abc.ABC):
    """For engines with weights of their own: these are sent when the policy has been trained since the last time.

    Args:
        version: gives the number of the present weights, which engines stamp on their responses.
    """

    def __init__(
        self, policy: PolicyInterface, generation: GenerationInterface, version: Callable[[], int], check_digests: bool = True
    ) -> None:  # fmt: skip
        super().__init__(policy, generation, check_digests)
        self._version = version
        self._metrics: dict[str, float | str | None] = {}

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """The metrics of the last refit: `refit/bytes`, `refit/seconds` (digests included), `refit/gb_per_s`, `refit/version` and
        `weights/digest`, the policy's own.

        RuntimeError when an engine has other weights than the policy afterwards.
        """
        if self._stale:
            with timer("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
                self._refit()
            self._stale = False
        return dict(self._metrics)

    @abc.abstractmethod
    def _refit(self) -> None:
        """Sends the present weights; sets `_metrics`, and `_digest` to that of the policy."""
