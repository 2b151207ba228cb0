"""Re-export reward shaping."""

from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping
