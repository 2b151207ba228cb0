import gc

import pytest
from nemo_rl_cpp.metrics import memory
from nemo_rl_cpp.metrics.timer import Timer


def touch(mib):
    block = bytearray(mib << 20)
    block[::4096] = b"\x01" * len(block[::4096])
    return block


def test_peak_memory_is_measured_for_each_phase_of_a_step():
    if not memory.reset_peak_rss():
        pytest.skip("the peak cannot be reset on this system")
    timer, phases = Timer(), memory.PhaseMemory()
    timer.subscribe(phases)
    with timer.step(0):
        with timer("generation"), timer("generation/inner"):
            block = touch(200)
            del block
            gc.collect()
        with timer("policy_training"):
            block = touch(20)
            del block
    metrics = phases.step_metrics()
    assert metrics["peak_rss_gb/generation"] - metrics["peak_rss_gb/policy_training"] > 0.1
    assert metrics["peak_rss_gb/run"] >= metrics["peak_rss_gb/generation"]
    assert 0 < metrics["rss_gb"] <= metrics["peak_rss_gb/run"]
    assert "peak_rss_gb/generation/inner" not in metrics and "peak_rss_gb/total_step_time" not in metrics
    assert set(phases.step_metrics()) == {"rss_gb", "peak_rss_gb/run"}


def test_garbage_collector_is_unfrozen_after_a_run_even_if_the_run_failed():
    gc.unfreeze()
    with pytest.raises(KeyError), memory.startup_objects_frozen():
        assert gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_freeze_count() == 0
