"""Rollouts beside training: the bits repeat, a run resumes from a checkpoint, and the correction is for staleness alone."""

import json

import pytest
import tiny
import torch
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.models.policy.lm_policy import Policy
from test_dedicated_engines import apart
from test_several_processes import tensor_digest

pytestmark = pytest.mark.usefixtures("forked_workers")
BESIDE = (
    *apart(1, 1), "{}.async_{}.enabled=true", "loss_fn.use_importance_sampling_correction=true", "checkpointing.enabled=true",
    "checkpointing.metric_name=null", "checkpointing.keep_top_k=null",
)  # fmt: skip
TIMES = ("seconds", "_per_s", "memory", "refit/", "utilization", "time")


def make(folder, steps, *overrides, section="grpo", **options):
    config = f"{section}_tiny.yaml"
    given = [text.format(section, section) for text in BESIDE]
    small = tiny.SMALL if section == "grpo" else ()
    return tiny.make(folder, *small, *given, f"{section}.max_num_steps={steps}", *overrides, config=config, **options)


def trained(folder, steps, *overrides, **options):
    """The weights of the last checkpoint, by their SHA-256, and what the steps say but for times."""
    with make(folder, steps, *overrides, **options) as run:
        run.train()
        history = [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in run.history]
    folder = folder / "checkpoints" / f"step_{steps}"
    files = sorted(path for path in folder.rglob("*.safetensors") if "trainer_state" not in path.parts)
    return {str(path.relative_to(folder)): tensor_digest(path) for path in files}, history


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(tmp_path):
    options = (
        "checkpointing.save_period=2",
        "grpo.val_period=3",
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "grpo.max_num_epochs=9",
    )
    whole, history = trained(tmp_path / "whole", 5, *options)
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 2, 2, 2]
    with make(tmp_path / "parts", 5, *options) as run:
        advance = run.state.advance

        def stop_after_two(*args):
            advance(*args)
            if run.state.step == 2:
                run.state.stop("the test")

        run.state.advance = stop_after_two
        run.train()
    kept = json.loads(
        (tmp_path / "parts" / "checkpoints" / "step_2" / "trainer_state" / "ready_batches.json").read_text()
    )
    assert [batch["weight_version"] for batch in kept] == [0, 1]
    rest, later = trained(tmp_path / "parts", 5, *options)
    assert rest == whole and later == history[2:]


def test_importance_sampling_corrects_only_for_weight_staleness(tmp_path):
    """The ratio of the loss is present probability over generation's, and generation's is, to the bit, that of the version that is
    stamped on the sample: nothing is in the ratio but what training changed."""
    batches = []
    with make(tmp_path, 3, "checkpointing.save_period=1", "policy.precision=float32") as run:
        train = run.policy.train

        def watched(batch, loss_fn, **given):
            batches.append((run.state.step, batch))
            return train(batch, loss_fn, **given)

        run.policy.train = watched
        run.train()
        history, config, tokenizer = run.history, run.config, run.tokenizer
    assert [row["stale_samples"] for row in history] == [0, 32, 32] and history[0]["sampling_importance_ratio"] == 1.0
    for step, batch in batches:
        versions = batch.weight_version.unique().tolist()
        assert versions == [max(0, step - 1)]
        saved = tmp_path / "checkpoints" / f"step_{versions[0]}" / "policy" / "weights"
        own = Policy(
            None, config.policy, tokenizer, weights_path=saved if versions[0] else None,
            init_reference_model=False, seed=config.loop.seed,
        )  # fmt: skip
        sampled = batch.token_mask != 0
        scored = batch.ragged(own.get_logprobs(batch)["logprobs"])
        assert torch.equal(scored[sampled], batch.generation_logprobs[sampled])
    for row in history[1:]:
        assert row["sampling_importance_ratio"] != 1.0 and abs(row["sampling_importance_ratio"] - 1) < 0.1


def test_samples_kept_by_dynamic_sampling_are_counted_as_stale(tmp_path):
    with make(tmp_path, 2, "grpo.use_dynamic_sampling=true", "checkpointing.enabled=false") as run:
        run.train()
        assert [row["stale_samples"] for row in run.history] == [0, 32]


def test_ppo_run_with_overlapping_generation_is_reproducible(tmp_path):
    sizes = (
        "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=32",
        "value.train_global_batch_size=32", "checkpointing.save_period=1000",
    )  # fmt: skip
    first, history = trained(tmp_path / "1", 3, *sizes, section="ppo")
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 1]
    again, _ = trained(tmp_path / "2", 3, *sizes, section="ppo")
    assert first == again


def test_async_grpo_is_rejected_if_generation_shares_the_training_weights():
    with pytest.raises(ValueError, match="grpo.async_grpo.enabled needs engines with weights of their own"):
        load_grpo_config("grpo_tiny.yaml", ["grpo.async_grpo.enabled=true"])
