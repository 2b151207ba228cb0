"""Algorithms under NeMo RL's names."""
