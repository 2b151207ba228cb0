"""A data set whose rows come out tokenised, each by the processor of its task."""

from nemo_rl_cpp.data.datasets.processed_dataset import AllTaskProcessedDataset

__all__ = ["AllTaskProcessedDataset"]
