import pytest
from nemo_rl_cpp.metrics.timer import Devices, performance_metrics
from nemo_rl_cpp.rollouts.rollout_metrics import group_reward_metrics, rewards_by_group


def test_performance_metrics_match_hand_computed_values():
    timing = {"total_step_time": 10.0, "generation": 4.0, "policy_training": 3.0, "policy_and_reference_logprobs": 2.0}
    metrics = performance_metrics(
        timing, num_samples=64, total_num_tokens=1200, num_generated_tokens=800, num_rollout_tokens=1400
    )
    assert metrics == pytest.approx({
        "samples_per_sec": 6.4, "samples_per_sec_per_gpu": 6.4, "tokens_per_sec": 120.0,
        "tokens_per_sec_per_gpu": 120.0, "generation_tokens_per_sec": 350.0, "generation_tokens_per_sec_per_gpu": 350.0,
        "policy_training_tokens_per_sec_per_gpu": 400.0, "policy_and_reference_logprobs_tokens_per_sec_per_gpu": 600.0,
        "training_worker_group_tokens_per_sec": 240.0, "training_worker_group_tokens_per_sec_per_gpu": 240.0,
        "decode_tokens_per_sec": 200.0,
    })  # fmt: skip
    counts = dict(num_samples=64, total_num_tokens=1200, num_generated_tokens=800, num_rollout_tokens=1400)
    found = performance_metrics(timing, devices=Devices(total=5, training=3, generation=2), **counts)
    of = {"samples": 5, "tokens": 5, "generation_tokens": 2}  # the other rates are of the three training devices
    for name, value in metrics.items():
        stage = name.removesuffix("_per_sec_per_gpu")
        assert found[name] == pytest.approx(value / of.get(stage, 3) if name != stage else value), name


def test_shares_of_equal_and_mixed_reward_groups_exclude_groups_of_one_sample():
    assert group_reward_metrics([[1], [0], [0]]) == {"groups/num": 3.0, "zero_std_groups": 0}
    metrics = group_reward_metrics([[1, 1], [0], [0]])
    assert metrics["groups/num"] == 3.0 and metrics["groups/pct_equal"] == 100.0 and metrics["groups/pct_mixed"] == 0.0


def test_group_reward_metrics_match_hand_computed_values():
    groups = rewards_by_group([1, 0, 1, 0, 1, 0.5, 0, 0.5], [7, 3, 7, 3, 5, 9, 5, 9])
    assert groups == [[1, 1], [0, 0], [1, 0], [0.5, 0.5]]
    assert group_reward_metrics(groups) == {
        "groups/num": 4.0, "groups/pct_equal": 75.0, "groups/pct_equal_best": 25.0, "groups/pct_equal_worst": 25.0,
        "groups/pct_mixed": 25.0, "zero_std_groups": 3,
    }  # fmt: skip


@pytest.mark.parametrize("value, best, worst", [(1.0, 100.0, 0.0), (0.0, 0.0, 100.0), (-1.0, 0.0, 100.0)])
def test_groups_with_equal_rewards_count_as_best_if_positive_and_otherwise_as_worst(value, best, worst):
    metrics = group_reward_metrics([[value] * 2] * 2)
    assert (metrics["groups/pct_equal_best"], metrics["groups/pct_equal_worst"]) == (best, worst)
