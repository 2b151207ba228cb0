"""Models on this machine: a folder, a model inside a Python package, or a model of the Hugging Face Hub."""
