"""Evaluation: pass@k and cons@k of a model on a data set."""
