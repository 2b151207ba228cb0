import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp import cli
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.models.memory import forecast
from nemo_rl_cpp.models.model_sizes import model_sizes

ROOT = Path(__file__).resolve().parents[3]


def test_check_command_reports_valid_and_invalid_configurations(capsys):
    assert cli.main(["check", "--config", "prorlv2.yaml", "logger.wandb.project=x"]) == 0
    assert "prorlv2.yaml: no mistakes (grpo)" in capsys.readouterr().out
    assert cli.main(["check", "--config", "evals/eval.yaml"]) == 0
    assert cli.main(["check", "--config", "ppo_math_1B.yaml", "ppo.nothing=1"]) == 2
    assert "ppo.nothing is unknown" in capsys.readouterr().err


SMOL = dict(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=10,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": "8"}', '"a"', "\xff"])
def test_model_sizes_returns_none_for_an_invalid_model_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert model_sizes(str(tmp_path), {}) is None
    assert model_sizes(str(tmp_path), SMOL | {"hidden_size": "8"}) is None
    assert model_sizes("nowhere", SMOL | {"head_dim": -1}) is None


def _parts(phases, name):
    return dict(next(phase for phase in phases if phase.name == name).parts)


def test_memory_estimate_of_a_run_matches_hand_computed_values(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4}\nloss_fn: {reference_policy_kl_penalty: 0}\n"
        f"policy: {{model_name: m, hf_config_overrides: {SMOL!r}, max_total_sequence_length: 16, train_global_batch_size: 8, precision: bfloat16}}\n"
        "data: {train: {dataset_name: arithmetic}}\n".replace("True", "true")
    )
    phases = forecast(load_grpo_config(tmp_path / "c.yaml"))
    n = model_sizes("m", SMOL).parameters
    generation = _parts(phases, "generation")
    assert generation["policy weights"] == 2 * n
    assert generation["policy master weights"] == 4 * n
    assert generation["policy optimizer"] == 8 * n
    # 8 sequences of 16 tokens, k and v, 2 layers, 2 heads of 2, 2 bytes
    assert generation["KV cache"] == 8 * 16 * 2 * 2 * 2 * 2 * 2
    assert "reference weights" not in generation
    full = _parts(phases, "policy training")["activations"]
    checkpointed = forecast(load_grpo_config(tmp_path / "c.yaml", ["policy.dtensor_cfg.activation_checkpointing=true"]))
    assert _parts(checkpointed, "policy training")["activations"] < full
    with_reference = forecast(load_grpo_config(tmp_path / "c.yaml", ["loss_fn.reference_policy_kl_penalty=0.1"]))
    assert _parts(with_reference, "generation")["reference weights"] == 2 * n


def test_memory_estimate_counts_validation_samples_only_if_a_validation_runs():
    def cache(*overrides):
        step = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4")
        return _parts(forecast(load_grpo_config("grpo_tiny.yaml", [*step, *overrides])), "generation")["KV cache"]

    never = ("grpo.val_period=0", "grpo.val_at_end=false")
    # 100 samples, and two groups that share their prompts
    assert cache() == cache(*never, "grpo.val_at_end=true") > 20 * cache(*never)


def test_memory_estimate_of_a_run_is_the_sum_over_all_processes_of_the_run():
    def parts(*overrides):
        return _parts(forecast(load_grpo_config("grpo_arithmetic_smollm2.yaml", list(overrides))), "policy training")

    one = parts("policy.gradient_blocks=4")
    two = parts("policy.gradient_blocks=4", "cluster.executor=processes", "cluster.gpus_per_node=2")
    assert two["policy weights"] == 2 * one["policy weights"] and two["activations"] == 2 * one["activations"]
    for part in ("policy optimizer", "policy master weights"):
        assert two[part] == one[part]
    # four blocks in one process: three gradients at once, of 4, 2 and 1 blocks; two blocks in each of two: two
    assert one["policy gradients"] * 2 * 2 == two["policy gradients"] * 3
    assert one["policy gradients"] == 3 * parts()["policy gradients"]


def test_installed_package_finds_its_configuration_and_prompt_files_without_the_source_tree(tmp_path):
    from nemo_rl_cpp import _config

    package = tmp_path / "site" / "nemo_rl_cpp"
    shutil.copytree(ROOT / "python/nemo_rl_cpp", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "configs", package / "configs")
    (package / Path(_config.__file__).name).symlink_to(_config.__file__)
    code = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from nemo_rl_cpp.config import find_config, load_grpo_config\n"
        "from nemo_rl_cpp.files.prompt_files import find_file\n"
        f"assert str(find_config('grpo_arithmetic_smollm2.yaml')).startswith({str(tmp_path)!r})\n"
        f"assert str(find_file('examples/prompts/cot.txt', 'key')).startswith({str(tmp_path)!r})\n"
        "load_grpo_config('examples/configs/grpo_math_1B.yaml')\n"
    )
    # the copy lies elsewhere than its neighbours
    libraries = Path(_config.__file__).parents[1] / "cmeel.prefix" / "lib"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
