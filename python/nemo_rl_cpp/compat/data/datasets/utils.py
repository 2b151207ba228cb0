"""Reading, joining and configuring data sets."""

from nemo_rl_cpp.data.datasets.utils import (
    assert_no_double_bos,
    extract_necessary_env_names,
    is_local,
    load_dataset_from_path,
    load_hub_dataset,
    merge_datasets,
    update_single_dataset_config,
)
