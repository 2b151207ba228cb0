import os
import signal
import subprocess
import sys

import hostile_verifier
import pytest
from hostile_verifier import HostileVerifier, NeverStarts
from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.environments import verifier_pool
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.environments.verifier_pool import VerifierPool
from processes import verifier_pids, wait_until_gone


@pytest.fixture
def pool():
    pool = VerifierPool(
        HostileVerifier, VerifierPoolConfig(num_workers=2, verifier_deadline_s=1.0, verifier_memory_mb=256)
    )
    yield pool
    pool.shutdown()


@pytest.mark.slow
def test_verifier_pool_kills_hanging_verifications_and_completes_all_others(pool):
    before = set(verifier_pids(pool))
    verdicts = pool.verify(["ok", "bigint", "ok", "sleep", "ok", "stopped", "wrong"], ["ok"] * 7)
    assert verdicts.scores == [1, 0, 1, 0, 1, 0, 0]
    assert (verdicts.timed_out, verdicts.crashed, verdicts.oversized) == (3, 0, 0)
    assert verdicts.answers[0] == "ok" and verdicts.answers[1] is None
    assert len(verifier_pids(pool)) == 2 and wait_until_gone(before - set(verifier_pids(pool))) == []
    assert pool.verify(["ok"] * 50, ["ok"] * 50).scores == [1] * 50


def test_response_whose_verification_crashes_or_runs_out_of_memory_scores_zero(pool):
    verdicts = pool.verify(["abort", "exit", "memory", "ok"], ["ok"] * 4)
    assert verdicts.scores == [0, 0, 0, 1] and verdicts.timed_out == 0
    assert verdicts.crashed == 2  # too much memory is an exception inside the verifier, which scores 0


def test_printed_verifier_output_is_ignored_and_child_processes_of_a_verifier_end_at_a_timeout(pool):
    assert pool.verify(["print", "ok"], ["ok", "ok"]).scores == [0, 1]
    verdicts = pool.verify(["child"], ["ok"])
    assert verdicts.timed_out == 1
    with open(hostile_verifier.child_pid_file(os.getpid())) as written:
        child = int(written.read())
    os.unlink(hostile_verifier.child_pid_file(os.getpid()))
    assert wait_until_gone([child]) == []


def test_verifier_pool_replaces_an_idle_worker_process_that_stops_reading_requests(monkeypatch):
    monkeypatch.setattr(verifier_pool, "_SEND_SECONDS", 1)
    pool = VerifierPool(HostileVerifier, VerifierPoolConfig(num_workers=1, verifier_deadline_s=5.0))
    assert pool.verify(["ok"], ["ok"]).scores == [1]
    os.kill(pool._workers[0].pid, signal.SIGSTOP)
    assert pool.verify(["x" * 900_000], ["ok"]).crashed == 1  # more than the socket's buffer holds
    assert pool.verify(["ok"], ["ok"]).scores == [1]
    pool.shutdown()


def test_response_longer_than_max_answer_chars_scores_zero_without_verification(pool):
    pool.cfg.max_answer_chars = 10
    verdicts = pool.verify(["x" * 11, "ok"], ["ok", "ok"])
    assert verdicts.scores == [0, 1] and verdicts.oversized == 1


def test_verifier_pool_verifies_responses_of_900000_characters(pool):
    assert pool.verify(["y" * 900_000, "ok"], ["y" * 900_000, "ok"]).scores == [1, 1]


def test_invalid_verifier_option_raises_instead_of_scoring_zero(pool):
    with pytest.raises(ValueError, match="unknown option"):
        pool.verify(["misuse"], ["ok"])
    assert pool.verify(["ok"], ["ok"]).scores == [1]


def test_verifier_pool_shutdown_ends_all_worker_processes(pool):
    pids = verifier_pids(pool)
    pool.shutdown()
    pool.shutdown()
    assert wait_until_gone(pids) == []


def test_garbage_collection_of_a_verifier_pool_ends_all_worker_processes():
    pool = VerifierPool(HostileVerifier, VerifierPoolConfig(num_workers=1))
    pids = verifier_pids(pool)
    del pool
    assert wait_until_gone(pids) == []


def test_verifier_that_cannot_start_is_an_error_that_states_the_reason():
    pool = VerifierPool(NeverStarts, VerifierPoolConfig())
    with pytest.raises(RuntimeError, match="the dictionary is missing"):
        pool.verify(["a"], ["a"])
    pool.shutdown()


SCRIPT = """
from hostile_verifier import HostileVerifier
from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.environments.verifier_pool import VerifierPool
pool = VerifierPool(HostileVerifier, VerifierPoolConfig(num_workers=2, verifier_deadline_s=1.0))
assert pool.verify(["ok"], ["ok"]).scores == [1]
print(*(worker.pid for worker in pool._workers), flush=True)
"""


@pytest.mark.slow
def test_no_verifier_process_remains_when_a_program_without_a_main_guard_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2 and program.wait(timeout=60) == 0
    assert wait_until_gone(pids) == []


HOSTILE = [
    r"$5^{5^{5^{5^5}}}$", r"\boxed{5^{5^{5^{5^5}}}}", r"\boxed{9999999999!!}", r"$\sum_{k=1}^{10^{12}} k!$",
    "(" * 50_000 + ")" * 50_000, r"\boxed{" * 20_000, "$" * 30_001, r"\frac{" * 5_000 + "1" + "}{2}" * 5_000,
    "9" * 200_000, "answer is \x00\ud800 $x$", r"\boxed{__import__('os').system('kill -9 0')}", "x" * 10_000_000, "",
]  # fmt: skip


@pytest.mark.slow
def test_math_responses_that_hang_or_crash_the_verifier_score_zero_and_are_counted():
    env = MathEnvironment.remote({"num_workers": 2, "verifier_deadline_s": 1.0})
    logs = [[{"role": "assistant", "content": text}] for text in [*HOSTILE, r"$\boxed{7}$"]]
    result = env.step(logs, [{"ground_truth": "7"}] * len(logs))
    assert result.rewards.tolist() == [0.0] * len(HOSTILE) + [1.0]
    metrics = env.pop_metrics()
    assert metrics["verifier_timeouts"] >= 2 and metrics["verifier_oversized"] == 1
    assert env.pop_metrics() == {}
    pids = verifier_pids(env)
    env.shutdown()
    assert wait_until_gone(pids) == []
