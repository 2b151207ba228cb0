"""Data sets: the loading of raw rows, the processing per task, and the names that configurations use."""

from nemo_rl_cpp.data.datasets.files import (
    ListDataset,
    extract_necessary_env_names,
    load_dataset_from_path,
    merge_datasets,
)
from nemo_rl_cpp.data.datasets.processed_dataset import AllTaskProcessedDataset, RawDataset
from nemo_rl_cpp.data.datasets.response_datasets import load_eval_dataset, load_response_dataset

__all__ = [
    "AllTaskProcessedDataset",
    "ListDataset",
    "RawDataset",
    "extract_necessary_env_names",
    "load_dataset_from_path",
    "load_eval_dataset",
    "load_response_dataset",
    "merge_datasets",
]
