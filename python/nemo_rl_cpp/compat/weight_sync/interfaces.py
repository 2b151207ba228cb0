"""What the training loop asks of the way in which weights reach the engine."""

from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer

__all__ = ["WeightSynchronizer"]
