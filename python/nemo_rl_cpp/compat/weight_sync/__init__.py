"""How new weights reach the generation engine."""

from nemo_rl_cpp.compat.weight_sync.interfaces import WeightSynchronizer
from nemo_rl_cpp.weight_sync import create_weight_synchronizer
