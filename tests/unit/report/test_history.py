import math

import pytest
from nemo_rl_cpp.report.history import MetricHistory, downsample, validation_word
from synthetic_run import history_of


def test_metric_history_is_sorted_by_step_and_keeps_the_last_value_of_each_step():
    rows = [{"step": 2, "a": 2.0}, {"step": 1, "a": 1.0, "text": "x", "list": [1]}, {"step": 2, "a": 3.0}, {"a": 9.0}]
    history = MetricHistory([*rows, {"step": 3, "a": "nan", "b": "inf"}])
    assert history.curve("a").steps == [1, 2, 3] and history.curve("a").values[:2] == [1.0, 3.0]
    assert math.isnan(history.curve("a").values[2]) and history.curve("a").finite().values == [1.0, 3.0]
    assert history.curve("none", "b").values == [math.inf] and history.curve("none").steps == []
    assert history.names() == ["a", "b"] and history.last_step == 3 and MetricHistory().last_step == 0
    history.add({"step": 4, "a": 5.0})
    assert history.curve("a").steps == [1, 2, 3, 4]


def test_recent_mean_and_trend_of_a_metric_match_hand_computed_values():
    history = history_of(train__reward=[0.0, 0.2] * 10 + [1.0, 1.2] * 10, flat=[3.0] * 10, short=[1.0] * 5)
    assert history.recent("train/reward") == pytest.approx(1.1)
    assert history.recent("none") is None
    trend = history.trend("train/reward")
    assert trend.stretch == 7 and trend.first == pytest.approx(0.6 / 7) and trend.sigmas > 5
    assert history.trend("flat").sigmas == 0.0 and history.trend("short") is None
    assert history_of(x=[0.0] * 5 + [1.0] * 5).trend("x").sigmas > 3


def test_incomplete_rows_of_metrics_jsonl_are_skipped(tmp_path):
    assert MetricHistory.of_file(tmp_path / "none", {}).names() == []
    (tmp_path / "m").write_text('{"step": 1, "a": 1}\nnot json\n[1]\n{"step": 2, "a": 3}\n{"ste')
    assert MetricHistory.of_file(tmp_path / "m", {}).by_step("a") == {1: 1, 2: 3}


def test_downsampled_metric_keeps_every_spike_and_both_end_points():
    ys = [0.0] * 10_000
    ys[1234], ys[5678] = 9.0, -9.0
    xs, kept = downsample(list(range(10_000)), ys, 400)
    assert len(xs) <= 402 and max(kept) == 9.0 and min(kept) == -9.0 and (xs[0], xs[-1]) == (0, 9999)
    assert xs[kept.index(9.0)] == 1234
    assert downsample([1, 2], [math.nan, 2.0])[0] == [1, 2]


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ({"accuracy": 0.5, "num_samples": 100, "right_or_wrong": 1.0}, "accuracy"),
        ({"accuracy": 0.5, "num_samples": 100, "right_or_wrong": 0.0}, "reward"),
        ({"accuracy": 0.5, "num_samples": 100}, "accuracy"),
        ({}, "accuracy"),
    ],
)
def test_validation_reward_is_called_accuracy_in_the_report_only_if_rewards_are_0_or_1(metrics, word):
    history = MetricHistory([{"step": 1} | {f"validation/{name}": value for name, value in metrics.items()}])
    assert validation_word(history) == word
