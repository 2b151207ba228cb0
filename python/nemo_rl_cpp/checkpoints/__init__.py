"""Checkpoints: published atomically, and found after any crash."""
