"""Logging of a run's metrics and rollouts: to files, TensorBoard and experiment trackers."""
