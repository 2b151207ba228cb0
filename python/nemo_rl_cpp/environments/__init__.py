"""Environments: they answer the model's messages with observations and rewards."""
