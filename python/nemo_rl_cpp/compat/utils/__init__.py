"""Services of a run under NeMo RL's names."""
