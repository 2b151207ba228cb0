"""Re-export the data set of several tasks and the functions that load one."""

from nemo_rl_cpp.data.datasets.processed_dataset import AllTaskProcessedDataset
from nemo_rl_cpp.data.datasets.response_datasets import load_response_dataset
from nemo_rl_cpp.data.datasets.utils import extract_necessary_env_names
