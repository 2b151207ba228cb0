"""Reward shaping by response length: DAPO's overlong penalty and ProRLv2's stop-properly penalty."""

from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping, shaping_warning
from nemo_rl_cpp.config.loop import RewardShapingConfig
