"""Metrics over a batch of rollouts."""

from nemo_rl_cpp.environments.single_turn import calculate_pass_rate_per_prompt
