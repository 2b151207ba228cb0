"""Re-export the base of a data set."""

from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
