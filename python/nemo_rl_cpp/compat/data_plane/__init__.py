"""NeMo RL's transfer queues between workers, by name: data stays in one process here."""
