import math

import pytest
from nemo_rl_cpp.report.history import JsonlTail, MetricHistory


def test_curves_are_in_step_order_and_keep_the_later_value():
    history = MetricHistory(
        [
            {"step": 2, "a": 2.0},
            {"step": 1, "a": 1.0, "text": "x", "list": [1]},
            {"step": 2, "a": 3.0},
            {"a": 9.0},
            {"step": 3, "a": "nan", "b": "inf"},
        ]
    )
    assert history.curve("a").steps == [1, 2, 3] and history.curve("a").values[:2] == [1.0, 3.0]
    assert math.isnan(history.curve("a").values[2]) and history.curve("a").finite().values == [1.0, 3.0]
    assert history.curve("none", "b").values == [math.inf] and history.curve("none").steps == []
    assert history.names() == ["a", "b"] and history.last_step == 3 and MetricHistory().last_step == 0
    history.add({"step": 4, "a": 5.0})
    assert history.curve("a").steps == [1, 2, 3, 4]


def test_recent_and_trend():
    history = MetricHistory.of(train__reward=[0.0, 0.2] * 10 + [1.0, 1.2] * 10, flat=[3.0] * 10, short=[1.0] * 5)
    assert history.recent("train/reward", count=4) == pytest.approx(1.1)
    assert history.recent("none") is None
    trend = history.trend("train/reward")
    assert trend.stretch == 7 and trend.first == pytest.approx(0.6 / 7) and trend.sigmas > 5
    assert history.trend("flat").sigmas == 0.0 and history.trend("short") is None
    assert MetricHistory.of(x=[0.0] * 5 + [1.0] * 5).trend("x").sigmas > 3


def test_the_tail_gives_whole_new_lines_only(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = JsonlTail(path)
    assert tail.new_rows() == ([], False)
    path.write_text('{"step": 1}\n{"ste')
    assert tail.new_rows() == ([{"step": 1}], False)
    with open(path, "a") as file:
        file.write('p": 2}\nnot json\n[1]\n')
    assert tail.new_rows() == ([{"step": 2}], False)
    assert tail.new_rows() == ([], False)
    path.write_text('{"step": 1}\n')
    assert tail.new_rows() == ([{"step": 1}], True)
