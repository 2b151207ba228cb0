import json

import pytest
import tiny
import torch
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.rollouts.batches import build_train_batch
from test_dedicated_engines import apart
from test_several_processes import tensor_digest

pytestmark = pytest.mark.usefixtures("forked_workers")
BESIDE = (
    *apart(1, 1), "{}.async_{}.enabled=true", "loss_fn.use_importance_sampling_correction=true", "checkpointing.enabled=true",
    "checkpointing.metric_name=null", "checkpointing.keep_top_k=null",
)  # fmt: skip
AGE_2 = "grpo.async_grpo.max_trajectory_age_steps=2"
RECOMPUTE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
TIMES = ("seconds", "_per_s", "memory", "refit/bytes", "refit/sent", "utilization", "time")


def without_times(history):
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in history]


def make(folder, steps, *overrides, section="grpo", **options):
    config = f"{section}_tiny.yaml"
    given = [text.format(section, section) for text in BESIDE]
    small = tiny.SMALL if section == "grpo" else ()
    return tiny.make(folder, *small, *given, f"{section}.max_num_steps={steps}", *overrides, config=config, **options)


def trained(folder, steps, *overrides, **options):
    """Return the SHA-256 of each tensor file of the last checkpoint, and the steps' metrics except times."""
    with make(folder, steps, *overrides, **options) as run:
        run.train()
    folder = folder / "checkpoints" / f"step_{steps}"
    files = sorted(path for path in folder.rglob("*.safetensors") if "trainer_state" not in path.parts)
    return {str(path.relative_to(folder)): tensor_digest(path) for path in files}, without_times(run.history)


def stop_after(folder, step, steps, *overrides, **options):
    """Train the first `step` steps of a run of `steps` steps; return the weight versions of the batches in its
    checkpoint."""
    with make(folder, steps, *overrides, **options) as run:
        advance = run.state.advance

        def stopped(*args):
            advance(*args)
            if run.state.step == step:
                run.state.stop("the test")

        run.state.advance = stopped
        run.train()
    kept = json.loads((folder / "checkpoints" / f"step_{step}" / "trainer_state" / "ready_batches.json").read_text())
    return [batch["weight_version"] for batch in kept]


def test_resumed_async_run_with_dynamic_sampling_is_bit_identical_to_an_uninterrupted_run(tmp_path):
    options = (
        "checkpointing.save_period=2", "grpo.val_period=3", "grpo.max_num_epochs=9", AGE_2, "grpo.use_dynamic_sampling=true",
    )  # fmt: skip
    whole, history = trained(tmp_path / "whole", 5, *options)
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 2, 2, 2]
    assert stop_after(tmp_path / "parts", 2, 5, *options) == [0, 1]
    rest, later = trained(tmp_path / "parts", 5, *options)
    assert rest == whole and later == history[2:]


def test_importance_ratio_of_async_grpo_reflects_only_weight_updates_since_generation(tmp_path):
    """Generation's log-probabilities are bit-identical to those of the weight version that each sample records."""
    batches = []
    with make(tmp_path, 3, "checkpointing.save_period=1", "policy.precision=float32") as run:
        tiny.watch_training(run, lambda batch: batches.append((run.state.step, batch)))
        run.train()
        history = run.history
    assert [row["stale_samples"] for row in history] == [0, 32, 32] and history[0]["sampling_importance_ratio"] == 1.0
    for step, batch in batches:
        versions = batch.weight_version.unique().tolist()
        assert versions == [max(0, step - 1)]
        own = tiny.policy_of_version(tmp_path, run, versions[0])
        sampled = batch.token_mask != 0
        scored = batch.ragged(own.get_logprobs(batch)["logprobs"])
        assert torch.equal(scored[sampled], batch.generation_logprobs[sampled])
    for row in history[1:]:
        assert row["sampling_importance_ratio"] != 1.0 and abs(row["sampling_importance_ratio"] - 1) < 0.1


def test_force_on_policy_ratio_does_not_change_the_weights_if_each_batch_has_one_update(tmp_path):
    runs = [trained(tmp_path / str(i), 3, f"loss_fn.force_on_policy_ratio={i == 1}".lower()) for i in range(2)]
    assert runs[0][0] == runs[1][0]
    first, second = ([row["sampling_importance_ratio"] for row in history] for _, history in runs)
    assert first == second


def test_async_ppo_run_resumed_in_the_critics_warm_up_is_bit_identical_to_an_uninterrupted_run(tmp_path):
    options = (*tiny.SMALL_PPO, "checkpointing.save_period=2", "ppo.policy_training_start_step=2")
    whole, history = trained(tmp_path / "whole", 4, *options, section="ppo")
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 1, 1]
    assert [row["refit/version"] for row in history] == [0, 0, 0, 3]
    assert stop_after(tmp_path / "parts", 2, 4, *options, section="ppo") == [1]
    rest, later = trained(tmp_path / "parts", 4, *options, section="ppo")
    assert rest == whole and later == history[2:]


IN_FLIGHT = (
    "grpo.async_grpo.in_flight_weight_updates=true", "grpo.async_grpo.in_flight_after_tokens=2",
    "policy.generation.stop_token_ids=[]", "policy.generation.max_new_tokens=6",
)  # fmt: skip


def test_run_with_in_flight_weight_updates_resumes_unfinished_responses_bit_identically(tmp_path):
    options = (*IN_FLIGHT, RECOMPUTE, "checkpointing.save_period=2", "grpo.val_period=3", "grpo.max_num_epochs=9")
    whole, history = trained(tmp_path / "whole", 4, *options)
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 1, 1]
    assert [row["total_tokens_of_newer_weights"] for row in history] == [0, *[32 * 4] * 3]
    assert [row["total_tokens_of_older_weights"] for row in history] == [32 * 6, *[32 * 2] * 3]
    assert [row["mean_weight_versions"] for row in history] == [1, 2, 2, 2]
    assert stop_after(tmp_path / "parts", 2, 4, *options) == [1]
    served = "policy.generation.expose_http_server=true"  # whose server closes while weights change
    rest, later = trained(tmp_path / "parts", 4, *options, served)
    assert rest == whole and later == history[2:]


def test_run_that_keeps_the_kv_cache_after_weight_updates_is_equal_on_one_and_two_engines(tmp_path):
    options = (*IN_FLIGHT, AGE_2, "checkpointing.save_period=1000")
    one, history = trained(tmp_path / "one", 4, *options)
    assert [row["total_tokens_of_newer_weights"] > 0 for row in history] == [False, False, True, True]
    two, same = trained(tmp_path / "two", 4, *options, *apart(1, 2))
    assert two == one and same == history
    assert trained(tmp_path / "again", 4, *options, RECOMPUTE)[0] != one


def test_each_sampled_token_records_its_weight_version_and_sampling_logprob(tmp_path):
    """The log-probabilities of that version are bit-identical if the KV cache is recomputed after a weight update."""
    batches, options = [], ("checkpointing.save_period=1", "policy.precision=float32")
    with make(tmp_path, 3, *IN_FLIGHT, RECOMPUTE, *options) as run:
        collect = run.collector.collect

        def watched(timer):
            collected = collect(timer)
            batches.append((run.state.step, collected.samples))
            return collected

        run.collector.collect = watched
        run.train()
        history = run.history
    scorers = {}
    for step, samples in batches[1:]:
        batch = build_train_batch(samples, pad_token_id=run.tokenizer.pad_token_id)
        sampled = batch.token_mask != 0
        messages = [message for log in samples.message_log for message in log]
        versions = torch.cat([m.get("token_versions", m["token_ids"] * 0 - 1) for m in messages])
        assert sorted(versions[sampled].unique().tolist()) == [step - 1, step]
        for version in (step - 1, step):
            if version not in scorers:
                scorers[version] = tiny.policy_of_version(tmp_path, run, version)
            scored = batch.ragged(scorers[version].get_logprobs(batch)["logprobs"])
            mine = (versions == version) & sampled
            assert torch.equal(scored[mine], batch.generation_logprobs[mine])
    assert all(row["stale_samples"] == 32 for row in history[1:])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_grpo_with_in_flight_weight_updates_learns(tmp_path, seed):
    given = [text.format("grpo", "grpo") for text in BESIDE]
    run = tiny.train(
        tmp_path, *tiny.FAST, *given, "checkpointing.enabled=false", IN_FLIGHT[0], IN_FLIGHT[1], f"grpo.seed={seed}",
        "grpo.max_num_steps=300", until=0.9,
    )  # fmt: skip
    with run:
        rewards = [row["reward"] for row in run.history]
        assert rewards[0] < 0.2 and sum(rewards[-5:]) / 5 > 0.9
        assert run.history[-1]["total_tokens_of_newer_weights"] > 0


def test_async_run_uses_one_training_and_one_generation_process_by_default(tmp_path):
    config = load_grpo_config("grpo_tiny.yaml", [
        "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true", "policy.generation.colocated.enabled=false",
        "cluster.gpus_per_node=8",
    ])  # fmt: skip
    assert (trainers_of(config), engines_of(config), config.cluster.has_workers) == (1, 1, True)
    auto = trained(tmp_path / "auto", 2, "cluster.executor=auto", "cluster.gpus_per_node=8")
    assert auto == trained(tmp_path / "written", 2)
