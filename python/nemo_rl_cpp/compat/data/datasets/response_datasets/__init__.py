"""Data sets by the names that configurations use."""

from nemo_rl_cpp.data.datasets.response_datasets import (
    DATASET_REGISTRY,
    check_dataset_config,
    dataset_class,
    load_eval_dataset,
    load_response_dataset,
)

__all__ = ["DATASET_REGISTRY", "check_dataset_config", "dataset_class", "load_eval_dataset", "load_response_dataset"]
