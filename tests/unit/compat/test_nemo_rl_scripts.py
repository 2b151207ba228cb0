"""What NeMo RL's run scripts import and do before training, with `nemo_rl` replaced by `nemo_rl_cpp.compat`."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from nemo_rl_cpp.compat.algorithms.grpo import MasterConfig
from nemo_rl_cpp.compat.data_plane.factory import maybe_configure_data_plane_env
from nemo_rl_cpp.compat.models.generation import configure_generation_config
from nemo_rl_cpp.compat.utils.config import load_config, parse_hydra_overrides, resolve_config
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
IMPORTS = {
    "run_grpo.py": {
        "algorithms.grpo": "MasterConfig grpo_train setup shutdown_environments async_grpo_train",
        "algorithms.utils": "get_tokenizer",
        "data.utils": "setup_response_data",
        "data_plane.factory": "maybe_configure_data_plane_env",
        "distributed.virtual_cluster": "init_ray",
        "models.generation": "configure_generation_config",
        "utils.config": "load_config parse_hydra_overrides register_omegaconf_resolvers",
        "utils.logger": "get_next_experiment_dir log_container_init_timing",
        "utils.timer": "Timer",
    },
    "run_ppo.py": {"algorithms.ppo": "MasterConfig async_ppo_train ppo_train setup"},
    "run_eval.py": {
        "data.datasets": "AllTaskProcessedDataset load_eval_dataset",
        "data.datasets.eval_datasets": "_is_multimodal_dataset AIMEDataset GPQADataset LocalMathDataset MMLUDataset MathDataset",
        "data.datasets.response_datasets": "DATASET_REGISTRY load_response_dataset",
        "environments.utils": "create_env",
        "evals.eval": "MasterConfig run_env_eval setup",
    },
}


@pytest.mark.parametrize("script", IMPORTS)
def test_the_scripts_imports_exist(script):
    missing = [
        f"{module}.{name}"
        for module, names in IMPORTS[script].items()
        for name in names.split()
        if not hasattr(import_module(f"nemo_rl_cpp.compat.{module}"), name)
    ]
    assert not missing


def test_the_grpo_scripts_first_steps_with_vllm():
    config = load_config(CONFIGS / "grpo_tiny.yaml")
    config = parse_hydra_overrides(config, ["policy.generation.backend=vllm", "cluster.gpus_per_node=8"])
    config = MasterConfig(**resolve_config(config))
    maybe_configure_data_plane_env(config.data_plane)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    generation = configure_generation_config(config.policy["generation"], tokenizer)
    assert generation["stop_token_ids"] == [2]
    assert generation["vllm_cfg"]["load_format"] == "dummy" and generation["vllm_cfg"]["skip_tokenizer_init"] is True


def test_training_beside_generation_says_which_key_to_set():
    config = load_ppo_config(CONFIGS / "ppo_tiny.yaml")
    train = import_module("nemo_rl_cpp.compat.algorithms.ppo").async_ppo_train
    with pytest.raises(ValueError, match="needs ppo.async_ppo.enabled=true, which is false: set it, or call ppo_train"):
        train(*[None] * 13, config)
    config = load_grpo_config(CONFIGS / "grpo_tiny.yaml")
    train = import_module("nemo_rl_cpp.compat.algorithms.grpo").async_grpo_train
    with pytest.raises(
        ValueError, match="needs grpo.async_grpo.enabled=true, which is false: set it, or call grpo_train"
    ):
        train(*[None] * 11, config)
    config.grpo.async_grpo.enabled = True
    with pytest.raises(
        ValueError, match="max_trajectory_age_steps is 2, but grpo.async_grpo.max_trajectory_age_steps is 1"
    ):
        train(*[None] * 11, config, max_trajectory_age_steps=2)
    with pytest.raises(ValueError, match="distillation"):
        train(*[None] * 11, config, teacher_worker_groups={"a": None})
