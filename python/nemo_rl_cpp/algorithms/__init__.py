"""Algorithms: the losses, advantage estimators, reward functions and training loops of the guides."""
