"""Tokenizer, data sets, processors and the loader that feeds prompts to the training loop."""
