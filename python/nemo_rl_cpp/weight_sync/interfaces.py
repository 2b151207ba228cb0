"""What the training loop asks of the way in which weights reach the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nemo_rl_cpp.telemetry.timer import Timer


class WeightSynchronizer(Protocol):
    """Brings the policy's weights to the engine, and knows whether the engine's are old. They are until the first
    `sync_weights`."""

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """Brings the present weights over, where the engine's are old; metrics of the transfer, logged with the step."""

    def mark_stale(self) -> None:
        """The policy has been trained: the engine's weights are old."""

    def verify_before_training(self) -> None:
        """RuntimeError when the weights are not those under which the rollouts were generated."""
