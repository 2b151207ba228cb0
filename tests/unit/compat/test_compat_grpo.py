"""Functions that `nemo_rl.algorithms.grpo` has beside the loop, by hand."""

import pytest
import torch
from nemo_rl_cpp.compat.algorithms.grpo import aggregate_rollout_metrics, extract_initial_prompt_messages


def message(role, ids):
    return {"role": role, "content": "", "token_ids": torch.tensor(ids)}


def test_initial_prompt_by_length():
    logs = [
        [message("user", [1, 2]), message("assistant", [3]), message("environment", [4]), message("assistant", [5, 6])],
        [message("user", [1]), message("assistant", [7]), message("user", [8]), message("assistant", [9])],
    ]
    prompt = extract_initial_prompt_messages(logs, torch.tensor([2, 3]))
    assert [len(p) for p in prompt] == [1, 3]
    assert extract_initial_prompt_messages(logs, torch.tensor([0, 0])) == [[], []]
    with pytest.raises(ValueError, match="inside a response"):
        extract_initial_prompt_messages([[message("user", [1]), message("assistant", [2, 3])]], torch.tensor([2]))


def test_groups_aggregate_rates_durations_and_extremes():
    given = {
        "max_turns_reached_rate": [0.0, 1.0], "truncation_rate": [0.25, 0.75], "gen_tokens/max": [3, 9], "gen_tokens/min": [3, 9],
        "trajectory_duration_s/mean": [1.0, 3.0], "trajectory_duration_s/max": [2.0, 4.0], "trajectory_duration_s/min": [0.5, 1.0],
        "trajectory_duration_s/p95": [2.0, 4.0], "trajectory_duration_s/histogram": [[1.0], [2.0, 3.0]],
    }  # fmt: skip
    assert aggregate_rollout_metrics(given) == {
        "max_turns_reached_rate": 0.5, "truncation_rate": 0.5, "gen_tokens/max": 9, "gen_tokens/min": 3,
        "trajectory_duration_s/mean": 2.0, "trajectory_duration_s/max": 4.0, "trajectory_duration_s/min": 0.5,
        "trajectory_duration_s/p95": 3.0, "trajectory_duration_s/histogram": [1.0, 2.0, 3.0],
    }  # fmt: skip


def test_groups_aggregate_by_the_name():
    combined = aggregate_rollout_metrics(
        {"max_len": [3, 7], "min_len": [3, 7], "total_turns": [3, 7], "mean": [3, 7], "h": [[1], [2, 3]], "none": []}
    )
    assert combined == {"max_len": 7, "min_len": 3, "total_turns": 10, "mean": 5.0, "h": [1, 2, 3]}
