"""What NeMo RL's run scripts call before they start workers."""

from typing import Any


def maybe_configure_data_plane_env(data_plane_config: Any) -> None:
    """Nothing: there are no workers whose environment a transfer queue would need."""
