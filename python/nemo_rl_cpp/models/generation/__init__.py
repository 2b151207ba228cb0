"""Generation: the interface and the engines."""
