"""How new weights reach the generation engine."""

from nemo_rl_cpp.weight_sync.factory import create_weight_synchronizer
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer

__all__ = ["WeightSynchronizer", "create_weight_synchronizer"]
