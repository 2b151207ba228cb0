"""Algorithms: losses, advantage estimators, reward functions and the training loop."""
