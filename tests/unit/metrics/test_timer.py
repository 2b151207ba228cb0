import pytest
from nemo_rl_cpp.metrics.timer import TimeoutChecker, Timer, convert_to_seconds


def test_timer_sums_durations_of_a_repeated_stage_even_if_the_stage_raises(clock):
    timer = Timer()
    for seconds in (1.0, 2.0, 6.0):
        with timer("generation"):
            clock.now += seconds
    with pytest.raises(RuntimeError), timer.time("broken"):
        raise RuntimeError
    timer.record("broken", 1.5)
    assert timer.sums() == {"generation": pytest.approx(9.0), "broken": 1.5}


def test_timer_does_not_count_nested_stages_twice_in_the_step_time(clock):
    timer = Timer()
    with timer.step(7) as step_timer:
        assert step_timer is timer
        for _ in range(2):
            with timer("generation"):
                clock.now += 3.0
        with timer("policy_training"):
            clock.now += 1.0
            with timer("policy_training/sharding_data"):
                clock.now += 1.0
        clock.now += 2.0
    with timer("checkpointing"):
        clock.now += 5.0
    metrics = timer.step_timing_metrics()
    assert metrics["total_step_time"] == pytest.approx(10.0)
    assert metrics["generation"] == pytest.approx(6.0) and metrics["policy_training"] == pytest.approx(2.0)
    assert metrics["policy_training/sharding_data"] == pytest.approx(1.0)
    assert metrics["checkpointing"] == pytest.approx(5.0)
    assert metrics["accounted_share"] == pytest.approx(0.8)
    with timer.step(8):
        pass
    assert timer.step_timing_metrics() == {"total_step_time": 0.0, "accounted_share": 1.0}


def test_timeout_is_parsed_from_dd_hh_mm_ss():
    assert convert_to_seconds("00:03:45:00") == 13500
    assert convert_to_seconds("01:00:00:01") == 86401


def test_checkpoint_deadline_is_reported_exactly_once(clock):
    checker = TimeoutChecker("00:00:01:00")
    clock.now += 59
    assert not checker.check_save()
    clock.now += 1
    assert checker.check_save()
    assert not checker.check_save()


def test_checkpoint_deadline_leaves_time_for_the_slowest_step(clock):
    checker = TimeoutChecker("00:00:01:00")
    checker.mark_iteration()
    for seconds in (5.0, 12.0, 5.0):
        clock.now += seconds
        checker.mark_iteration()
    clock.now += 25.9
    assert not checker.check_save()
    clock.now += 0.2
    assert checker.check_save()
