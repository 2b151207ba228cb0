import importlib.util
import os
import signal
import sys
import time
from functools import partial

import pytest
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.ranks import OtherRankFailedError
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.errors import one_sentence
from players import lose, make
from processes import alive

pytestmark = pytest.mark.slow


def two_workers():
    return Cluster([2], use_gpus=False, settings=ClusterConfig(cpus_per_worker=1, worker_timeout_s=4.0))


@pytest.fixture
def cluster():
    made = two_workers()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def lasting():
    """A cluster shared by the tests that leave its workers alive."""
    made = two_workers()
    yield made
    made.shutdown()


def test_worker_calls_return_results_and_callback_events_in_rank_order(lasting):
    group, other = WorkerGroup(lasting, partial(make, 10)), WorkerGroup(lasting, partial(make, 20))
    assert group.call_all("number", 5) == [15, 16] and other.call_all("number", add=0) == [20, 21]
    assert group.call_all("base") == [10, 10]  # what is no method is read
    assert group.call_all("total") == [3.0, 3.0]
    whole, nothing = group.call_all("shards", 3)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and nothing is None
    told = []
    assert group.call_each("tell", [(2,), (3,)], "on_told", [lambda *t: told.append(t)] * 2) == [2, 3]
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_error_in_a_worker_call_names_the_rank_and_leaves_all_workers_usable(lasting):
    group = WorkerGroup(lasting, partial(make, 0))
    with pytest.raises(ValueError, match="rank 1 does not like this") as caught:
        group.call_all("fail_on", 1)
    assert "raised on rank 1 of 2" in caught.value.__notes__[0] and "in fail_together" in caught.value.__notes__[0]
    assert not isinstance(caught.value, OtherRankFailedError)
    assert group.call_all("number", 1) == [1, 2]
    with pytest.raises(AttributeError, match="no_such_method"):
        group.call_all("no_such_method")


def test_worker_processes_that_wait_for_a_failed_rank_are_terminated(forked_workers, cluster, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.distributed.worker_calls.GRACE_SECONDS", 0.5)
    group = WorkerGroup(cluster, partial(make, 0))
    pids = cluster.workers.pids
    with pytest.raises(ValueError, match="no barrier for me"):
        group.call_all("raise_while_others_wait", 0)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "number, said",
    [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "gave no sign of life for")],
    ids=["killed", "stopped"],
)
def test_error_for_a_killed_or_hanging_worker_names_it_and_no_process_remains(forked_workers, cluster, number, said):
    WorkerGroup(cluster, partial(make, 0))  # the workers are there
    began = time.monotonic()
    pids = lose(cluster, number, said)
    assert time.monotonic() - began < 15
    assert not any(alive(pid) for pid in pids)


def test_death_of_an_idle_worker_process_is_detected_at_once(forked_workers, cluster):
    group = WorkerGroup(cluster, partial(make, 0))
    pids, began = cluster.workers.pids, time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="rank 0 of 2"):
        while True:
            group.call_all("number", 0)
    assert time.monotonic() - began < 3
    with pytest.raises(WorkerLostError, match="was ended by SIGKILL.*it cannot do: number"):
        group.run_single_worker_single_data("number", 0, 0).result(timeout=5)


def test_unresponsive_worker_is_reported_as_lost_instead_of_hanging_the_run(forked_workers, cluster):
    group = WorkerGroup(cluster, partial(make, 0))
    os.kill(cluster.workers.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="rank 1 of 2 .* gave no sign of life"):
        group.call_all("size_of", b"0" * 8_000_000)


def test_worker_processes_ignore_signals_sent_to_the_whole_job(lasting):
    group = WorkerGroup(lasting, partial(make, 0))
    group.call_all("number", 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(lasting.workers.pids[0], number)
    assert group.call_all("number", 1) == [1, 2]


def test_error_in_user_code_of_a_worker_names_file_line_and_rank(forked_workers, cluster, tmp_path, monkeypatch):
    file = tmp_path / "users_builder.py"
    file.write_text("def build(ranks):\n    raise KeyError('truth')\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("users_builder", file)
    users_builder = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "users_builder", users_builder)  # gone after the test
    spec.loader.exec_module(users_builder)
    with pytest.raises(KeyError) as caught:
        WorkerGroup(cluster, users_builder.build)
    said = one_sentence(caught.value)
    assert "your code failed with KeyError" in said and "users_builder.py:2" in said and "(rank 0 of 2)" in said
