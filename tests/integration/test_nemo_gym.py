"""NeMo Gym's agents train the policy through its HTTP server. A replacement speaks the protocol of nemo-gym."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_rollouts_beside_training import BESIDE, without_times

STAND_IN = Path(__file__).parents[1] / "nemo_gym_stand_in"


@pytest.fixture
def gym(tmp_path, monkeypatch):
    """Return a function that trains on rows for NeMo Gym, and returns the metrics of each step."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("NEMO_GYM_STAND_IN_ENDED", str(tmp_path / "ended"))

    def train(*overrides, agents=("digit_agent",), watch=None):
        rows = [
            {
                "responses_create_params": {"input": digit, "temperature": 0.3, "metadata": {"chat_template_kwargs": "{}"}},
                "agent_ref": {"type": "responses_api_agents", "name": agents[n % len(agents)]},
                "verifier_metadata": {"digit": "7"},
            }
            for n, digit in enumerate("12345678")
        ]  # fmt: skip
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = tiny.make(
            tmp_path, "++env.should_use_nemo_gym=true",
            f"++env.nemo_gym={{config_paths:[digit.yaml],python:{sys.executable},timeout_s:60}}",
            "data.default.env_name=nemo_gym", "++data.default.processor=nemo_gym_data_processor", "data.validation=null",
            "~data.train.num_digits", "++data.train.dataset_name=NemoGymDataset", f"++data.train.data_path={data}", "policy.generation.expose_http_server=true",
            "policy.generation.max_new_tokens=1", "policy.optimizer.kwargs.lr=1e-2", *tiny.SMALL, *overrides,
        )  # fmt: skip
        with run:
            if watch is not None:
                watch(run)
            run.train()
        return run.history

    return train


def test_nemo_gym_run_learns_and_excludes_samples_flagged_by_the_agent_from_training(gym, tmp_path):
    history = gym("grpo.max_num_steps=14")
    rewards = [row["accuracy"] for row in history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    for row in history:
        assert row["token_mult_prob_error"] == 1 and row["max_logprob_gap"] == 0
        assert row["agent_errors"] == 0 and row["agent_calls"] == 32 and row["agent_calls_left_out"] == 0
        assert row["digit_agent/is_seven"] == row["digit_agent/reward"] == row["accuracy"]
        assert row["global_valid_toks"] == 32 * (1 - row["digit_agent/mask_sample"])
        assert "digit_agent/_internal" not in row
    assert (tmp_path / "ended").read_text() == "ended\n"


def test_samples_flagged_by_a_nemo_gym_agent_are_trained_if_masking_is_disabled(gym):
    history = gym("grpo.max_num_steps=1", "++env.should_mask_flagged_samples=false")
    assert history[0]["digit_agent/mask_sample"] > 0 and history[0]["global_valid_toks"] == 32


def test_failed_nemo_gym_agent_rollouts_are_counted_and_the_error_is_printed(gym, capsys):
    history = gym("grpo.max_num_steps=1", agents=("digit_agent", "broken_agent"))
    assert history[0]["agent_errors"] == 16 and history[0]["global_valid_toks"] <= 16
    assert "NeMo Gym: ConnectionError: the agent does not answer" in capsys.readouterr().out


def test_error_for_nemo_gym_servers_that_fail_to_start_contains_the_end_of_the_server_log(gym):
    with pytest.raises(RuntimeError, match=r"NeMo Gym has ended .*FileNotFoundError: no_such_server"):
        gym("grpo.max_num_steps=1", "++env.nemo_gym.config_paths=[no_such_server]")


@pytest.mark.parametrize(
    ("python", "said"),
    [("no/such/python", "cannot be started: No such file"), (sys.executable, "cannot import nemo_gym .*No module named")],
)  # fmt: skip
def test_python_interpreter_without_nemo_gym_is_an_error_before_the_model_is_loaded(gym, monkeypatch, python, said):
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ValueError, match=rf"env\.nemo_gym\.python is .*{said}"):
        gym(f"++env.nemo_gym.python={python}")


def test_async_nemo_gym_run_trains_on_sampled_tokens_and_resumes_from_a_checkpoint(gym, tmp_path):
    """The log-probabilities are bit-identical to those of the weight version that each sample records."""
    batches, pids = [], []

    def watch(run):
        pids.extend(run.cluster.workers.pids + run.engine_cluster.workers.pids)
        tiny.watch_training(run, lambda batch: batches.append((run.state.step, run, batch)))

    options = [text.format("grpo", "grpo") for text in BESIDE]
    options += [
        "policy.precision=float32", "checkpointing.save_period=1", "grpo.async_grpo.in_flight_weight_updates=true",
    ]  # fmt: skip
    history = gym("grpo.max_num_steps=4", *options, watch=watch)
    assert [row["avg_trajectory_age"] for row in history] == [0, 1, 1, 1]
    assert history[0]["token_mult_prob_error"] == 1 and history[0]["max_logprob_gap"] == 0
    for step, run, batch in batches:
        assert batch.weight_version.unique().tolist() == [max(0, step - 1)]
        own = tiny.policy_of_version(tmp_path, run, max(0, step - 1))
        sampled = batch.is_valid  # flagged samples are not scored
        scored = batch.ragged(own.get_logprobs(batch)["logprobs"])
        assert sampled.any() and torch.equal(scored[sampled], batch.generation_logprobs[sampled])

    whole = without_times(history)
    for folder in (tmp_path / "checkpoints").glob("step_[34]"):
        shutil.rmtree(folder)
    later = gym("grpo.max_num_steps=4", *options)
    assert without_times(later) == whole[2:]
    assert (tmp_path / "ended").read_text() == "ended\nended\n"
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
