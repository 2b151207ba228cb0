"""NeMo Gym's agents train the policy through its HTTP server; a stand-in has the protocol of the package nemo-gym."""

import json
import sys
from pathlib import Path

import pytest
import tiny

STAND_IN = Path(__file__).parents[1] / "nemo_gym_stand_in"


@pytest.fixture
def gym(tmp_path, monkeypatch):
    """Return a function that trains on rows for NeMo Gym, and returns its metrics of each step."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("NEMO_GYM_STAND_IN_ENDED", str(tmp_path / "ended"))

    def train(*overrides, agents=("digit_agent",)):
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
            run.train()
        return run.history

    return train


def test_nemo_gym_run_learns_and_trains_only_on_sampled_tokens_that_are_not_flagged(gym, tmp_path):
    history = gym("grpo.max_num_steps=14")
    rewards = [row["accuracy"] for row in history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    for row in history:
        assert row["token_mult_prob_error"] == 1 and row["max_logprob_gap"] == 0
        assert row["agent_errors"] == 0 and row["agent_calls"] == 32 and row["agent_calls_left_out"] == 0
        assert row["digit_agent/is_seven"] == row["digit_agent/reward"] == row["accuracy"]
        assert (
            row["global_valid_toks"] == 32 * (1 - row["digit_agent/mask_sample"]) and "digit_agent/_internal" not in row
        )
    assert (tmp_path / "ended").read_text() == "ended\n"


def test_flagged_samples_are_trained_if_should_mask_flagged_samples_is_false(gym):
    history = gym("grpo.max_num_steps=1", "++env.should_mask_flagged_samples=false")
    assert history[0]["digit_agent/mask_sample"] > 0 and history[0]["global_valid_toks"] == 32


def test_rows_whose_agent_fails_are_counted_and_the_error_is_printed(gym, capsys):
    history = gym("grpo.max_num_steps=1", agents=("digit_agent", "broken_agent"))
    assert history[0]["agent_errors"] == 16 and history[0]["global_valid_toks"] <= 16
    assert "NeMo Gym: ConnectionError: the agent does not answer" in capsys.readouterr().out


def test_servers_that_do_not_start_end_the_run_with_the_end_of_their_log(gym):
    with pytest.raises(RuntimeError, match=r"NeMo Gym has ended .*FileNotFoundError: no_such_server"):
        gym("grpo.max_num_steps=1", "++env.nemo_gym.config_paths=[no_such_server]")


@pytest.mark.parametrize(
    ("python", "said"),
    [("no/such/python", "cannot be started: No such file"), (sys.executable, "cannot import nemo_gym .*No module named")],
)  # fmt: skip
def test_interpreter_without_nemo_gym_is_an_error_before_the_model_is_loaded(gym, monkeypatch, python, said):
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ValueError, match=rf"env\.nemo_gym\.python is .*{said}"):
        gym(f"++env.nemo_gym.python={python}")
