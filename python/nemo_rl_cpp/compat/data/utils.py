"""From the `data` and `env` sections of a configuration to data sets and environments."""

from typing import Any

from nemo_rl_cpp.data.utils import (
    dataloader_state_file,
    get_train_dataset_name,
    load_dataloader_state,
    load_response_data,
    save_dataloader_state,
)


def setup_response_data(
    tokenizer: Any,
    data_config: Any,
    env_configs: Any = None,
    is_vlm: bool = False,
    max_total_sequence_length: int | None = None,
) -> tuple[Any, ...]:
    """`load_response_data` as a tuple: (train, validation), and with `env_configs` also (task_to_env, val_task_to_env)."""
    if is_vlm:
        raise ValueError("is_vlm=True asks for images or video: only text models are supported")
    data = load_response_data(tokenizer, data_config, env_configs, max_total_sequence_length)
    if env_configs is None:
        return data.train, data.validation
    return data.train, data.validation, data.environments, data.val_environments
