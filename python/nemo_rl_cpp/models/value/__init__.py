"""The value model of PPO."""

from nemo_rl_cpp.config.value import ValueConfig

__all__ = ["ValueConfig"]
