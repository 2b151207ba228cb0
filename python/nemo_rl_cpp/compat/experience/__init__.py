"""Rollouts under NeMo RL's names."""
