import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from nemo_rl_cpp.metrics.chrome_trace import ChromeTrace
from nemo_rl_cpp.metrics.timer import Timer


def stages(path):
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_stages_in_the_chrome_trace_lie_within_their_step(tmp_path):
    timer, trace = Timer(), ChromeTrace(tmp_path / "logs" / "trace.json", "GRPO tiny")
    timer.subscribe(trace)
    before = time.time() * 1e6
    with timer.step(1):
        with timer("generation"), timer("generation/prefill"):
            sum(range(100_000))
        with timer("policy_training"):
            pass
    after = time.time() * 1e6
    events = {event["name"]: event for event in stages(trace.path)}
    assert list(events) == ["generation/prefill", "generation", "policy_training", "total_step_time"]
    step = events.pop("total_step_time")
    assert before - 1e4 <= step["ts"] and step["ts"] + step["dur"] <= after + 1e4
    for event in events.values():
        assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
        assert event["pid"] == step["pid"] and event["tid"] == step["tid"]
    assert events["generation"]["ts"] + events["generation"]["dur"] <= events["policy_training"]["ts"] + 1
    names = [event for event in json.loads(trace.path.read_text()) if event["ph"] == "M"]
    assert [event["args"]["name"] for event in names] == ["GRPO tiny"]


def test_chrome_trace_reports_more_busy_cores_for_a_busy_stage_than_an_idle_one(tmp_path):
    timer, trace = Timer(), ChromeTrace(tmp_path / "trace.json")
    timer.subscribe(trace)
    with timer("busy"):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
    with timer("idle"):
        threading.Event().wait(0.05)
    busy, idle = stages(trace.path)
    assert busy["args"]["busy_cores"] > 2 * idle["args"]["busy_cores"]
    assert busy["args"]["rss_gb"] > 0


def test_concurrent_threads_have_separate_lines_in_the_chrome_trace(tmp_path):
    timer, trace = Timer(), ChromeTrace(tmp_path / "trace.json")
    timer.subscribe(trace)
    barrier = threading.Barrier(3, timeout=60)

    def work(label):
        with timer(label):
            barrier.wait()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, ["score0", "score1", "score2"]))  # raises what they raise
    events = stages(trace.path)
    assert {event["name"] for event in events} == {"score0", "score1", "score2"}
    assert len({event["tid"] for event in events}) == 3
