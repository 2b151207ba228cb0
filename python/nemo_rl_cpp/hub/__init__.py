"""Models on this machine: a folder, a model that a Python package carries, or one of the model hub."""
