"""A data set before tokenisation: rows, the split, and which processor and prompt go with them."""

from nemo_rl_cpp.data.datasets.raw_dataset import RawDataset
