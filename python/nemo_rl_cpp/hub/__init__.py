"""Finding models: in a folder, inside a Python package, or on the Hugging Face Hub."""
