"""A killed run that is started again ends as if nothing had happened."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import kill_resume  # noqa: E402

SMALL = [
    "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32",
    "grpo.val_period=4", "grpo.max_val_samples=20", "checkpointing.save_period=2",
]  # fmt: skip


def test_killed_runs_end_like_an_unbroken_one():
    problems = kill_resume.check("configs/grpo_tiny.yaml", 12, kills=3, overrides=SMALL, seed=7)
    assert problems == []


def test_with_dynamic_sampling_and_kept_surplus():
    dynamic = [*SMALL, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5", "grpo.dynamic_sampling_keep_surplus=true"]
    problems = kill_resume.check("configs/grpo_tiny.yaml", 8, kills=2, overrides=dynamic, seed=3)
    assert problems == []


def test_the_comparison_sees_a_difference(tmp_path):
    """The check must be able to fail: another seed leaves other weights, optimizer state and metrics."""
    import os

    prints = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        kill_resume.run_to_end(kill_resume.command("configs/grpo_tiny.yaml", folder, 2, [*SMALL, f"grpo.seed={seed}"]), dict(os.environ))
        prints.append(kill_resume.fingerprint(folder))
    found = kill_resume.differences(*prints)
    assert "policy/weights/model.safetensors" in found and "policy/optimizer/optimizer.safetensors" in found and "metrics" in found
