"""From the `data` and `env` sections of a configuration to data sets and environments."""

from nemo_rl_cpp.data.utils import (
    dataloader_state_file,
    get_train_dataset_name,
    load_dataloader_state,
    save_dataloader_state,
    setup_response_data,
)

__all__ = [
    "dataloader_state_file",
    "get_train_dataset_name",
    "load_dataloader_state",
    "save_dataloader_state",
    "setup_response_data",
]
