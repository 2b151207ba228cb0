"""NeMo RL's contract of the way in which weights reach the engine. What the training loop asks is
`nemo_rl_cpp.weight_sync.WeightSynchronizer`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_cpp.telemetry.timer import Timer


class WeightSynchronizer(ABC):
    """Brings the policy's weights to the engine, and knows whether the engine's are old."""

    @abstractmethod
    def sync_weights(
        self, *, timer: "Timer | None" = None, kv_scales: dict[str, float] | None = None
    ) -> dict[str, float] | None:
        """Brings the current weights over; metrics of the transfer, if there are any."""

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the engine's weights are older than the policy's; true until the first successful `sync_weights`."""

    def init_communicator(self) -> None:
        """Connects both sides; nothing to do where they share memory."""

    def shutdown(self) -> None:
        """Disconnects. Safe to call twice."""
