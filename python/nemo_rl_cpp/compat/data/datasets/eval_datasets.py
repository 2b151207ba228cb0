"""NeMo RL's module of evaluation data sets. The sets are those of `response_datasets`, by the same names."""

from nemo_rl_cpp.data.datasets.response_datasets import load_eval_dataset
from nemo_rl_cpp.data.datasets.response_datasets.hub_math import AIME2024Dataset as AIMEDataset
from nemo_rl_cpp.data.datasets.response_datasets.hub_math import MathDataset
from nemo_rl_cpp.data.datasets.response_datasets.hub_multichoice import GPQADataset, MMLUDataset, MMLUProDataset
from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset as LocalMathDataset


def _is_multimodal_dataset(dataset_name: str) -> bool:
    """Whether a data set holds images or sound: none does here."""
    return False
