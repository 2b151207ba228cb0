import json

import pytest
import tiny
import torch
from loop_fakes import TOKENIZER, Policy, fake_run, logged, train
from nemo_rl_cpp.algorithms.algorithm import GroupAdvantages
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch


def make(folder, *overrides, **options):
    return fake_run(folder, "grpo", *overrides, **options)


def test_grpo_step_calls_generation_and_training_methods_in_the_expected_order(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_steps=1", "checkpointing.enabled=false"))
    assert run.policy.events == ["prepare_for_generation", "generate", "finish_generation", "train"]
    assert run.state.step == 1 and run.state.stop_reason == "max_num_steps"


def test_grpo_trains_only_response_tokens_with_leave_one_out_advantages(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_steps=1"))
    batch = run.policy.trained[0]
    assert batch["input_ids"].shape[0] == 8 and batch["group_id"].tolist() == [0] * 4 + [1] * 4
    assert "prev_logprobs" not in batch and "reference_policy_logprobs" not in batch
    lengths = batch["input_lengths"].tolist()
    prompt, width = len("prompt 0:"), batch["input_ids"].shape[1]
    for row, length in enumerate(lengths):
        assert batch["token_mask"][row].tolist() == [0] * prompt + [1] * (length - prompt) + [0] * (width - length)
    rewards = batch["rewards"]
    for group in (slice(0, 4), slice(4, 8)):  # leave-one-out baseline, by hand
        others = (rewards[group].sum() - rewards[group]) / 3
        centered = rewards[group] - others
        assert (torch.sign(batch["advantages"][group][:, -1]) == torch.sign(centered)).all()


def test_grpo_step_logs_every_expected_metric(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_steps=2"))
    rows = logged(run)
    assert sorted(rows) == [1, 2]
    expected = {
        "loss", "grad_norm", "reward", "accuracy", "mean_prompt_length", "total_num_tokens", "advantages/sum", "advantages/mean",
        "advantages/max", "advantages/min", "baseline_reward/pct_0", "baseline_reward/pct_1", "baseline_reward/pct_mixed", "lr",
        "global_valid_toks", "zero_std_groups", "token_mult_prob_error", "refit/bytes", "weights/digest", "total_turns",
        "avg_turns_per_sample", "natural_termination_rate", "truncation_rate", "mean_gen_tokens_per_sample", "stale_samples",
        "groups/pct_equal",
    }  # fmt: skip
    assert {f"train/{name}" for name in expected} <= set(rows[1])
    assert rows[1]["train/refit/bytes"] == 0
    assert rows[1]["train/weights/digest"] == f"{0:016x}" and rows[2]["train/weights/digest"] == f"{1:016x}"
    timing = logged(run, "timing/train/")[1]
    for stage in ("total_step_time", "generation", "reward_calculation", "data_processing", "policy_training", "prepare_for_generation/total",
                  "policy_and_reference_logprobs", "advantage_calculation"):  # fmt: skip
        assert f"timing/train/{stage}" in timing
    assert "performance/tokens_per_sec" in logged(run, "performance/")[1]
    assert "memory/peak_rss_gb/run" in logged(run, "memory/")[1]


def test_dynamic_sampling_generates_batches_until_enough_groups_have_mixed_rewards(tmp_path):
    # prompts 0 and 1 are always right, the others mixed; a batch has 2 * 1.5 prompts
    run = make(
        tmp_path, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5", "grpo.max_num_steps=1",
        respond=lambda prompt, key: "2" if prompt[7] in "01" or key[2] < 2 else "1",
    )  # fmt: skip
    train(run)
    assert run.policy.events.count("generate") == 2
    assert run.state.draw_counter == 6  # every prompt drawn counts, not only those trained on
    (batch,) = run.policy.trained
    assert TOKENIZER.decode(batch["input_ids"][:, 7]) == "22223333" and batch["group_id"].tolist() == [0] * 4 + [1] * 4
    row = logged(run)[1]
    assert row["train/dynamic_sampling_num_gen_batches"] == 2
    assert row["train/filtered_reward"] == 0.5 and row["train/reward"] == pytest.approx(2 / 3)
    # tokens of both rounds over the time of both: 24 responses of "2" or "1" and eos; a third of all tokens is trained
    assert row["train/total_generated_tokens"] == 48
    assert row["train/total_rollout_tokens"] == 3 * row["train/total_num_tokens"]
    rates, seconds = logged(run, "performance/")[1], logged(run, "timing/train/")[1]["timing/train/generation"]
    assert rates["performance/decode_tokens_per_sec"] == pytest.approx(48 / seconds)
    assert rates["performance/generation_tokens_per_sec"] == pytest.approx(row["train/total_rollout_tokens"] / seconds)


def test_max_num_epochs_ends_the_grpo_run_after_that_many_epochs(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_epochs=2", "grpo.max_num_steps=100", num_rows=5))  # two steps an epoch
    assert run.state.step == 4 and run.state.current_epoch == 2 and run.state.stop_reason == "max_num_epochs"
    assert run.state.consumed_samples == 8


def test_checkpoints_are_saved_every_save_period_steps_and_at_the_end(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_steps=3", "checkpointing.keep_top_k=null"))
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_2", "step_3"]
    info = json.loads((tmp_path / "checkpoints" / "step_3" / "training_info.json").read_text())
    assert info["total_steps"] == 3 and info["draw_counter"] == 6 and info["log_dir"] == str(run.log_dir)


def test_resumed_grpo_run_writes_the_same_log_as_an_uninterrupted_run(tmp_path):
    first = train(make(tmp_path, "grpo.max_num_steps=2"))
    policy = Policy()
    policy.version = 2
    second = train(make(tmp_path, "grpo.max_num_steps=4", policy=policy))
    assert second.log_dir == first.log_dir and second.state.step == 4
    rows = logged(second)
    assert sorted(rows) == [1, 2, 3, 4]
    whole = train(make(tmp_path / "whole", "grpo.max_num_steps=4"))
    assert logged(whole) == rows


def test_resuming_a_finished_grpo_run_performs_no_training_step(tmp_path):
    train(make(tmp_path, "grpo.max_num_steps=2"))
    policy = Policy()
    again = train(make(tmp_path, "grpo.max_num_steps=2", policy=policy))
    assert policy.events == [] and again.state.step == 2


def interrupted_in_step_2(folder, *overrides):
    """Return a run that Ctrl-C ended during its second step."""
    run = make(folder, "grpo.max_num_steps=50", "checkpointing.save_period=50", *overrides)
    step = run.policy.train

    def train_and_interrupt(*args, **kwargs):
        if run.policy.version == 1:
            run.stop.reason = "interrupted"  # what the first Ctrl-C sets
        return step(*args, **kwargs)

    run.policy.train = train_and_interrupt
    return train(run)


def test_ctrl_c_ends_the_run_after_the_current_step_with_a_checkpoint(tmp_path):
    run = interrupted_in_step_2(tmp_path)
    assert run.state.step == 2 and run.state.stop_reason == "interrupted"
    assert (tmp_path / "checkpoints" / "step_2").is_dir()
    assert "interrupted" in (run.log_dir / "report.html").read_text()


@pytest.mark.parametrize(
    "limit, last, status",
    [(50, 1, "stopped in time"), (1, 1, "finished")],  # the second has ended by itself
)
def test_run_stopped_by_its_time_limit_is_not_reported_as_finished(tmp_path, monkeypatch, limit, last, status):
    published, heard = [], []
    monkeypatch.setattr("nemo_rl_cpp.algorithms.build.publish", lambda config, folder: published.append(folder) or {})
    run = make(tmp_path, f"grpo.max_num_steps={limit}", "checkpointing.checkpoint_must_save_by=00:00:00:00")
    monkeypatch.setattr(run.callbacks, "end", heard.append)
    train(run)
    assert run.state.step == last and heard == [status] and bool(published) == (status == "finished")
    assert (tmp_path / "checkpoints" / "step_1").is_dir() and status in (run.log_dir / "report.html").read_text()


def test_validation_runs_at_the_start_after_every_val_period_steps_and_at_the_end(tmp_path):
    validated = ("grpo.val_at_start=true", "grpo.val_at_end=true", "grpo.val_period=2")
    run = train(make(tmp_path, "grpo.max_num_steps=3", *validated))
    assert [row["step"] for row in run.validations] == [0, 2, 3]
    assert sorted(logged(run, "validation/")) == [0, 2, 3]
    assert (run.log_dir / "val_data_step0.jsonl").exists()


@pytest.mark.parametrize("threshold, validated", [(2.0, [2, 4]), (-1.0, [2])])
def test_validation_that_ctrl_c_skipped_is_the_first_thing_that_the_resumed_run_does(threshold, validated, tmp_path):
    stop = ("grpo.stop_at_validation_metric=accuracy", f"grpo.stop_at_validation_threshold={threshold}")
    keys = ("grpo.val_period=2", "grpo.val_at_end=false", *stop)
    assert interrupted_in_step_2(tmp_path, *keys).validations == []
    policy = Policy()
    policy.version = 2
    run = train(make(tmp_path, "grpo.max_num_steps=4", "checkpointing.save_period=50", *keys, policy=policy))
    assert [row["step"] for row in run.validations] == validated and run.state.step == validated[-1]
    assert sorted(logged(run, "validation/")) == validated


def test_validation_at_the_start_or_end_without_validation_data_is_a_warning(tmp_path, capfd):
    with tiny.make(tmp_path, *tiny.SMALL, "data.validation=null", "grpo.val_at_start=true") as run:
        assert run.validation is None
    assert "grpo.val_at_start is true, but no validation runs without data" in capfd.readouterr().err


def test_grpo_run_saves_a_checkpoint_and_ends_if_validation_reaches_the_threshold(tmp_path):
    run = make(
        tmp_path, "grpo.max_num_steps=9", "grpo.val_period=1", "grpo.stop_at_validation_metric=accuracy", "checkpointing.save_period=50",
        "grpo.stop_at_validation_threshold=0.9", "checkpointing.metric_name=val:accuracy", respond=lambda prompt, key: "2",
    )  # fmt: skip
    train(run)
    assert run.state.step == 1 and run.state.stop_reason == "accuracy reached 0.9"
    info = json.loads((tmp_path / "checkpoints" / "step_1" / "training_info.json").read_text())
    assert info["val:accuracy"] == 1.0 and info["val_reward"] == 1.0


def test_validation_metric_that_is_to_end_a_run_without_validation_data_is_an_error_before_the_run(tmp_path):
    stop = ("grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.9", "grpo.val_period=1")
    with pytest.raises(ValueError, match="stop_at_validation_metric=accuracy needs validation data"):
        tiny.make(tmp_path, *tiny.SMALL, *stop, "data.validation=null")


@pytest.mark.parametrize(
    "low, high, expected",
    [(None, None, [-3.0, 0.5, 4.0]), (-1.0, None, [-1.0, 0.5, 4.0]), (-1.0, 2.0, [-1.0, 0.5, 2.0])],
)
def test_advantages_are_clipped_at_the_configured_bounds(low, high, expected):
    class Given:
        last_metrics = {}

        def compute_advantage(self, **inputs):
            return torch.tensor([[-3.0, 0.5, 4.0]])

    one, row = torch.ones(1), torch.ones(1, 3)
    of_tokens = dict.fromkeys(("input_ids", "token_mask", "generation_logprobs"), row)
    of_samples = dict.fromkeys(("sample_mask", "rewards", "group_id"), one)
    batch = TrainBatch.of({"input_lengths": torch.tensor([3]), **of_tokens, **of_samples})
    GroupAdvantages(Given(), GRPOConfig(advantage_clip_low=low, advantage_clip_high=high)).add(batch)
    assert batch["advantages"].tolist() == [expected]


def test_train_data_log_file_of_a_step_has_one_line_per_sample(tmp_path):
    run = train(make(tmp_path, "grpo.max_num_steps=1"))
    rows = [json.loads(line) for line in (run.log_dir / "train_data_step1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"content", "rewards", "input_lengths", "token_ids", "token_loss_mask", "sample_loss_mask", "advantages", "generation_logprobs",
            "idx", "truncated"} <= set(rows[0])  # fmt: skip
    assert rows[0]["content"][0] == {"role": "user", "content": "prompt 0:"}
