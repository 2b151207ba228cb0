"""Environments, which respond to the model's messages with observations and rewards."""
