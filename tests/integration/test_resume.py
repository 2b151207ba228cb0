import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import tiny
from tiny_layers import LAYERS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import kill_resume  # noqa: E402

RUN = [
    "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32", "grpo.val_period=4",
    "grpo.max_val_samples=20", "checkpointing.save_period=2",
]  # fmt: skip
# kept surplus: every kind of state that a checkpoint holds is in use
MODES = {
    "dapo": ("grpo.dynamic_sampling_keep_surplus=true", "policy.train_global_batch_size=16"),
    "prorlv2": ("policy.train_global_batch_size=16",),
    "grpo": (),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def elsewhere(one_thread):
    """Return a function that calls a function in another process, which forks the runs, so that a run starts without
    importing torch again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=kill_resume.fork_runs) as pool:
        yield lambda *how, **more: pool.submit(*how, **more).result()


@pytest.fixture(scope="module")
def check(elsewhere):
    return partial(elsewhere, kill_resume.check)


@pytest.mark.parametrize("mode, kills", [("dapo", 2), ("prorlv2", 1), ("grpo", 1)])
def test_killed_and_resumed_grpo_run_is_bit_identical_to_an_uninterrupted_run(check, mode, kills):
    assert check(f"configs/{mode}_tiny.yaml", 8, kills, [*RUN, *MODES[mode]], seed=7) == []


@pytest.mark.parametrize(
    "model",
    [
        "nemotron_h with experts",
        "qwen3_5_moe_text",
        "deepseek_v3",
        "lfm2_moe",
        "gemma4_text",
        "gemma4_text with experts",
    ],
)
def test_killed_and_resumed_run_is_bit_identical_to_an_uninterrupted_run_for_other_architectures(check, model):
    shape = tiny.shaped({"model_type": model.partition(" ")[0]} | LAYERS[model])
    assert check("configs/grpo_tiny.yaml", 8, 1, [*RUN, *shape], seed=7) == []


# in the middle of the critic's warm-up, and after it; several optimizer steps an epoch
PPO_RUN = [
    "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=16", "ppo.val_period=4",
    "ppo.max_val_samples=20", "checkpointing.save_period=2", "ppo.policy_training_start_step=3",
]  # fmt: skip


def test_killed_and_resumed_ppo_run_is_bit_identical_to_an_uninterrupted_run(check):
    assert check("configs/vapo_tiny.yaml", 10, kills=2, overrides=PPO_RUN, seed=3) == []


def test_run_comparison_detects_one_flipped_weight_bit_and_one_changed_metric(elsewhere, tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    elsewhere(kill_resume.run_to_end, kill_resume.command("configs/grpo_tiny.yaml", whole, 2, RUN), {})
    expected = kill_resume.fingerprint(whole)
    shutil.copytree(whole, changed)
    assert kill_resume.differences(expected, kill_resume.fingerprint(changed)) == []
    optimizer = next((changed / "checkpoints").rglob("optimizer.safetensors"))
    content = bytearray(optimizer.read_bytes())
    content[-1] ^= 1
    optimizer.write_bytes(content)
    assert kill_resume.differences(expected, kill_resume.fingerprint(changed)) == [
        "policy/optimizer/optimizer.safetensors"
    ]
    metrics = whole / "logs" / "exp_001" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/reward": 0', '"train/reward": 1', 1))
    assert "metrics" in kill_resume.differences(expected, kill_resume.fingerprint(whole))
