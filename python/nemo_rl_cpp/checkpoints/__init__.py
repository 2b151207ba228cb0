"""Checkpoints, which are published atomically and can be found after any crash."""
