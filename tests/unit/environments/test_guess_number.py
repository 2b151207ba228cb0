import pytest
from fakes import ByteTokenizer, FakeGeneration, prompts
from nemo_rl_cpp.data.datasets import load_response_dataset
from nemo_rl_cpp.environments.guess_number import GuessNumberEnv
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.rollouts.rollouts import run_multi_turn_rollout


def turn(env, said, **state):
    result = env.step([[{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]], [state])
    return result.observations[0]["content"], result.rewards.item(), bool(result.terminateds.item()), result.metadata[0]


def test_guess_number_environment_gives_hand_computed_hints_rewards_and_end_of_game():
    env = GuessNumberEnv({"higher": "+", "lower": "-", "stop_strings": ["\n"]})
    assert turn(env, " 3\n", secret=5) == ("+", 0.0, False, {"secret": 5, "guesses": 1})
    assert turn(env, "6", secret=5, guesses=1) == ("-", 0.0, False, {"secret": 5, "guesses": 2})
    assert turn(env, "it is 5", secret=5, guesses=2) == ("", 1.0, True, {"secret": 5, "guesses": 3})
    assert turn(env, "4", secret=5, guesses=2) == ("", 0.0, True, {"secret": 5, "guesses": 3})
    assert turn(env, "no", secret=5) == ("", 0.0, True, {"secret": 5, "guesses": 1})
    assert turn(env, "", secret=5)[2]
    assert turn(env, "9" * 5000, secret=5)[0] == "-"  # an endless number is cut, not computed with
    metrics = env.pop_metrics()
    assert metrics == {"solved": 0.25, "invalid_guess": 0.5, "guesses_per_game": 2.0}
    assert env.pop_metrics() == {}
    with pytest.raises(ValueError, match="max_guesses must be at least 1, not 0"):
        GuessNumberEnv({"max_guesses": 0})


def halving(prompt, key):
    """Return the next guess of a binary search from 1 to 7, which needs at most three guesses."""
    low, high, guess = 1, 7, None
    for said in prompt[1:]:
        if said.isdigit():
            guess = int(said)
        elif said == "+":
            low = guess + 1
        else:
            high = guess - 1
    return str((low + high) // 2)


def play(max_rollout_turns=3, **config):
    env = create_env("guess_number", {"higher": "+", "lower": "-", "stop_strings": list("0123456789"), **config})
    engine = FakeGeneration(halving)
    batch = prompts(["?"] * 7, ["guess_number"] * 7, [{"secret": n} for n in range(1, 8)])
    batch["stop_strings"] = [list("0123456789")] * 7
    return engine, *run_multi_turn_rollout(engine, batch, ByteTokenizer(), {"guess_number": env}, 64, max_rollout_turns)


def test_binary_search_player_wins_every_guess_number_game():
    engine, result, metrics = play()
    assert result["total_reward"].tolist() == [1.0] * 7
    assert metrics["solved"] == 1.0 and metrics["guesses_per_game"] == (1 + 2 * 2 + 4 * 3) / 7
    assert [call.size for call in engine.calls] == [7, 6, 4]  # who has won plays no more
    texts = ["".join(message["content"] for message in log) for log in result["message_log"]]
    assert texts == ["?4-2-1", "?4-2", "?4-2+3", "?4", "?4+6-5", "?4+6", "?4+6+7"]
    assert metrics["truncation_rate"] == 0.0  # stop strings end each turn


def test_guess_number_game_ends_at_max_guesses_or_max_rollout_turns():
    _, result, metrics = play(max_guesses=2)
    assert result["total_reward"].tolist() == [0, 1, 0, 1, 0, 1, 0]
    _, result, metrics = play(max_rollout_turns=1)
    assert result["total_reward"].sum() == 1 and metrics["max_turns_reached_rate"] == pytest.approx(6 / 7)


def test_guess_number_data_set_contains_every_secret_number():
    rows = load_response_dataset(
        {"dataset_name": "guess_number", "max_number": 7, "num_samples": 14, "stop_strings": ["\n"]}
    ).dataset
    assert sorted(row["extra_env_info"]["secret"] for row in rows) == sorted(list(range(1, 8)) * 2)
    assert {row["messages"][0]["content"] for row in rows} == {"I am thinking of a number from 1 to 7.\nGuess:"}
    assert rows[0]["stop_strings"] == ["\n"]
    with pytest.raises(ValueError, match="min_number"):
        load_response_dataset({"dataset_name": "guess_number", "min_number": 9, "max_number": 7})
