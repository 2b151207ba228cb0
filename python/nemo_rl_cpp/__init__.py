"""Reinforcement-learning post-training of language models with a C++/CUDA core.

Importing the package imports nothing else: torch and the native core load at the first name that needs them, so
that a configuration is checked without torch.
"""

__version__ = "0.1.0"
