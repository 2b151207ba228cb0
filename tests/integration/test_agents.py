import digit_agent
import pytest
import tiny
import torch

AGENT = (
    "++env.agent={{function:digit_agent.{0},timeout_s:60}}", "data.default.env_name=agent", "++data.default.processor=agent_data_processor",
    "policy.generation.expose_http_server=true", "policy.generation.max_new_tokens=1", "policy.optimizer.kwargs.lr=1e-2",
    "policy.max_total_sequence_length=16", *tiny.SMALL,
)  # fmt: skip


def overrides(function, *more):
    return [each.format(function) if "{0}" in each else each for each in AGENT] + list(more)


STEPS = 10


def trained_rows(batches):
    """Return (token ids, token mask) of each sample."""
    each = [(batch.rows(batch.input_ids), batch.rows(batch.token_mask)) for batch in batches]
    return [(row.tolist(), mask.tolist()) for ids, masks in each for row, mask in zip(ids, masks)]


def run_of(folder, function, *more):
    digit_agent.SEEN.clear()
    run = tiny.make(folder, *overrides(function, *more))
    batches = []
    tiny.watch_training(run, lambda batch: batches.append(batch.copy()))
    with run:
        run.train()
    return run, batches


def test_grpo_with_an_agent_function_learns_and_trains_only_on_sampled_tokens(tmp_path):
    run, batches = run_of(tmp_path / "a", "two_turns", f"grpo.max_num_steps={STEPS}")
    rewards = [row["accuracy"] for row in run.history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    for row in run.history:
        assert row["token_mult_prob_error"] == 1 and row["max_logprob_gap"] == 0
        assert row["agent_calls"] == 3 * 32 and row["agent_calls_left_out"] == 32 and row["avg_turns_per_sample"] == 2
        assert row["agent_errors"] == row["agent_timeouts"] == 0 and 0 <= row["aside"] <= 1
    seen = {}
    for key, version, ids in digit_agent.SEEN:
        seen.setdefault(version, {}).setdefault(key, []).append(ids)
    assert sorted(seen) == list(range(STEPS))  # the version rises with every step
    rows = trained_rows(batches)
    assert len(rows) == STEPS * 32
    for version, rollouts in seen.items():
        conversations = sorted(max(calls, key=len) for calls in rollouts.values())
        assert conversations == sorted(ids for ids, _ in rows[32 * version : 32 * (version + 1)])
    assert all(mask == [0] * (len(mask) - 3) + [1, 0, 1] for _, mask in rows)

    again, repeated = run_of(tmp_path / "b", "two_turns", "grpo.max_num_steps=3")
    for one, other in zip(batches[:3], repeated, strict=True):
        assert all(torch.equal(one.tokens[name], other.tokens[name]) for name in ("input_ids", "generation_logprobs"))
    assert [row["loss"] for row in again.history] == [row["loss"] for row in run.history[:3]]


def test_failed_agent_rollouts_are_counted_and_excluded_from_training(tmp_path, capsys):
    run, _ = run_of(tmp_path / "a", "fails", "grpo.max_num_steps=2")
    for row in run.history:
        assert row["agent_errors"] == row["num_masked_samples"] == row["num_mask_sample_filtered"] == 16
        assert "cut_prompts_rate" not in row  # the prompts fit
    assert "KeyError" in capsys.readouterr().out
    for function, seconds, said in (
        ("sleeps", 0.5, "all 32 .*timeout_s"),
        ("wants_another_temperature", 120, r"policy\.generation\.temperature"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run_of(tmp_path / function, function, "grpo.max_num_steps=1", f"env.agent.timeout_s={seconds}")


def test_agent_rollout_without_a_response_gets_no_overlong_penalty(tmp_path):
    shaping = {"enabled": True, "overlong_buffer_length": 1, "overlong_buffer_penalty": 0.5, "max_response_length": 1}
    keys = [f"grpo.reward_shaping.{name}={value}" for name, value in shaping.items()]
    run, batches = run_of(tmp_path, "begins_in_vain", "grpo.max_num_steps=1", *keys)
    assert run.history[0]["agent_errors"] == 16
    assert batches[0].rewards.tolist() == [0.5, 0.0] * 16  # a response of one token has the whole penalty


def test_validation_generates_rollouts_with_the_agent_function(tmp_path):
    run = tiny.make(tmp_path, *overrides("two_turns", "grpo.max_num_steps=1", "grpo.max_val_samples=8"))
    with run:
        result = run.validate()
        assert result.metrics["num_samples"] == 8 and 0 <= result.metrics["accuracy"] <= 1
        assert result.metrics["avg_turns_per_sample"] == 2
        assert all("-val-" in key for key, _, _ in digit_agent.SEEN[-24:])


def test_agent_function_without_an_http_server_is_an_error_that_names_the_key_to_set(tmp_path):
    with pytest.raises(ValueError, match="policy.generation.expose_http_server"):
        tiny.make(tmp_path, *overrides("two_turns", "policy.generation.expose_http_server=false"))
