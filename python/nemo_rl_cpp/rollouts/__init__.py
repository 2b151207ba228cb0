"""Rollouts: the policy responds to prompts, and environments reply and score, turn by turn."""
