"""Events and the newest measurement of a timer."""

import time

import pytest
from nemo_rl_cpp.compat.utils.timer import Timer
from nemo_rl_cpp.telemetry import timer as timer_module


class Clock:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timer_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timer_module.time, "monotonic", lambda: self.now)

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_start_stop_and_reductions(clock):
    timer = Timer()
    for seconds in (1.0, 2.0, 6.0):
        timer.start("generation")
        clock.wait(seconds)
        assert timer.stop("generation") == pytest.approx(seconds)
    assert timer.get_elapsed("generation") == pytest.approx([1.0, 2.0, 6.0])
    assert timer.get_latest_elapsed("generation") == pytest.approx(6.0)
    expected = {"mean": 3.0, "median": 2.0, "min": 1.0, "max": 6.0, "sum": 9.0, "count": 3, "std": (14 / 3) ** 0.5}
    for operation, value in expected.items():
        assert timer.reduce("generation", operation) == pytest.approx(value)
    assert timer.get_timing_metrics({"generation": "max"}) == {"generation": pytest.approx(6.0)}
    assert timer.get_timing_metrics({}) == {"generation": pytest.approx([1.0, 2.0, 6.0])}


def test_misuse_is_reported():
    timer = Timer()
    with pytest.raises(KeyError):
        timer.get_elapsed("a")
    with pytest.raises(ValueError, match="invalid operation 'avg'"):
        timer.reduce("a", "avg")


def test_record_mark_and_reset():
    timer = Timer({"rank": 3})
    timer.record("x", 1.5)
    before = time.time()
    assert timer.mark("failed", {"worker": 2}) >= before
    assert timer.get_markers("failed")["failed"][0][1] == {"worker": 2}
    assert timer.get_markers("never") == {"never": []}
    timer.record("y", 2.0)
    timer.reset("x")
    assert timer.get_timing_metrics("sum") == {"y": 2.0}
    timer.reset()
    assert timer.get_timing_metrics() == {} and timer.get_markers() == {}
