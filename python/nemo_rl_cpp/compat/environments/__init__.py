"""Environments under NeMo RL's names."""
