"""Logging of a run's numbers and texts: files, TensorBoard, trackers."""
