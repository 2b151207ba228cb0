"""Question-and-answer pairs from a file or the hub."""

from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset, task_name_of, text_of
