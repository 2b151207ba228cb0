"""Where the numbers and texts of a run go: files, TensorBoard, trackers."""
