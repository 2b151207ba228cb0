"""Tokenizers, data sets, processors, and the loader that passes prompts to the training loop."""
