"""Checkpoints: published whole or not at all, found again after any crash."""
