import pytest
from nemo_rl_cpp.report.findings import validation_trend
from nemo_rl_cpp.report.history import MetricHistory, panels_of, validation_word


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ({"accuracy": 0.5, "num_samples": 100, "right_or_wrong": 1.0}, "accuracy"),
        ({"accuracy": 0.5, "num_samples": 100, "right_or_wrong": 0.0}, "reward"),
        ({"accuracy": 0.5, "num_samples": 100}, "accuracy"),
        ({}, "accuracy"),
    ],
)
def test_only_right_or_wrong_is_an_accuracy(metrics, word):
    history = MetricHistory([{"step": 1} | {f"validation/{name}": value for name, value in metrics.items()}])
    assert validation_word(history) == word


def test_flat_curves_are_apart_and_one_point_is_not_flat():
    history = MetricHistory.of(train__reward=[0.1, 0.2], train__lr=[1e-3, 1e-3], validation__accuracy=[0.5])
    panels = panels_of([history])
    assert [panel.title for panel in panels.moving] == ["Reward", "Validation accuracy"]
    assert [panel.title for panel in panels.flat] == ["Learning rate"]
    # two runs with constant but different rates differ
    other = MetricHistory.of(train__lr=[2e-3, 2e-3])
    assert "Learning rate" in [panel.title for panel in panels_of([history, other]).moving]


@pytest.mark.parametrize(("low", "level"), [(0.14, "info"), (0.2, "good")])
def test_a_validation_that_rose_within_its_intervals_is_no_success_yet(low, level):
    history = MetricHistory.of(
        validation__accuracy=[0.1, 0.3],
        validation__accuracy_ci95_low=[0.05, low],
        validation__accuracy_ci95_high=[0.15, 0.4],
    )
    found = validation_trend(history)
    assert found.level == level and found.title.startswith("Validation accuracy rose from 0.1")
    assert ("intervals of the two overlap" in found.advice) == (level == "info")
