"""Evaluation of a model on a data set, by pass@k or cons@k."""
