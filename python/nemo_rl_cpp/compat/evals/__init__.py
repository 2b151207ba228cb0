"""Evaluation under NeMo RL's names."""
