"""Chooses how weights reach the engine."""

from nemo_rl_cpp.weight_sync.factory import create_weight_synchronizer

__all__ = ["create_weight_synchronizer"]
