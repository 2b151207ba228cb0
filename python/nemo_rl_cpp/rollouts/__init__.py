"""Rollouts: they combine prompts, generation and environments."""
