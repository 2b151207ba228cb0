"""Re-export the data set of questions and answers."""

from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset
