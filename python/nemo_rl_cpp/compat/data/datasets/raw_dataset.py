"""Re-export the base of a data set."""

from nemo_rl_cpp.data.datasets.raw_dataset import RawDataset
