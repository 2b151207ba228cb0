"""Environments, which answer the model's messages with observations and rewards."""
