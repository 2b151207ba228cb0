"""The value model of PPO."""
