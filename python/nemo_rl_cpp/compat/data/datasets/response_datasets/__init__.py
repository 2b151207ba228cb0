"""Data sets by the names that configurations use."""

from nemo_rl_cpp.data.datasets.response_datasets import (
    DATASET_REGISTRY,
    check_dataset_config,
    dataset_class,
    load_eval_dataset,
    load_response_dataset,
)
from nemo_rl_cpp.data.datasets.response_datasets.hub_math import (
    AIME2024Dataset,
    DAPOMath17KDataset,
    DAPOMathAIME2024Dataset,
    DeepScalerDataset,
    GSM8KDataset,
    OpenMathInstruct2Dataset,
)
from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset
