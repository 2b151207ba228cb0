"""Models under NeMo RL's names."""
