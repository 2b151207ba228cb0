"""Rollouts: prompts, generations and environments brought together."""
