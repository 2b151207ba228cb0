"""Worker processes: what they answer, and what the run's process learns when one of them fails, ends or is silent."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.process_workers import WorkerLostError
from nemo_rl_cpp.distributed.ranks import OtherRankFailedError
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_cpp.distributed.worker_groups import RayWorkerGroup


class Player:
    """Lives in a worker: each method is one way of working together or of failing."""

    def __init__(self, base, ranks):
        self.base, self.ranks = base, ranks

    def number(self, add):
        return self.base + self.ranks.rank + add

    def total(self):
        return self.ranks.sum(float(self.ranks.rank + 1))

    def shards(self, size):
        begin = self.ranks.rank * size
        own = torch.arange(begin, begin + size).float()
        return self.ranks.gather_shards(own, (begin, begin + size), size * self.ranks.size, "test")

    def fail_on(self, rank):
        error = ValueError(f"rank {rank} does not like this") if self.ranks.rank == rank else None
        self.ranks.fail_together(error)

    def raise_while_others_wait(self, rank):
        if self.ranks.rank == rank:
            raise ValueError("no barrier for me")
        self.ranks.communicator.barrier(phase="test")

    def end_while_others_wait(self, rank, number):
        if self.ranks.rank == rank:
            os.kill(os.getpid(), number)
        self.ranks.communicator.barrier(phase="test")

    def tell(self, count, on_told=None):
        for i in range(count):
            on_told(self.ranks.rank, i)
        return count


def make(base, ranks):
    return Player(base, ranks)


@pytest.fixture
def cluster():
    made = RayVirtualCluster([2], use_gpus=False, settings=ClusterConfig(cpus_per_worker=1, worker_timeout_s=4.0))
    yield made
    made.shutdown()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls_and_results(cluster):
    group, other = RayWorkerGroup(cluster, partial(make, 10)), RayWorkerGroup(cluster, partial(make, 20))
    assert group.call_all("number", 5) == [15, 16] and other.call_all("number", add=0) == [20, 21]
    assert group.call_all("base") == [10, 10]  # what is no method is read
    assert group.call_all("total") == [3.0, 3.0]
    whole, nothing = group.call_all("shards", 3)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and nothing is None
    told = []
    assert group.call_each("tell", [(2,), (3,)], "on_told", [lambda *t: told.append(t)] * 2) == [2, 3]
    assert sorted(told) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_failure_is_the_ranks_own_and_all_stay(cluster):
    group = RayWorkerGroup(cluster, partial(make, 0))
    with pytest.raises(ValueError, match="rank 1 does not like this") as caught:
        group.call_all("fail_on", 1)
    assert "raised on rank 1 of 2" in caught.value.__notes__[0] and "in fail_together" in caught.value.__notes__[0]
    assert not isinstance(caught.value, OtherRankFailedError)
    assert group.call_all("number", 1) == [1, 2]
    with pytest.raises(AttributeError, match="no_such_method"):
        group.call_all("no_such_method")


def test_no_rank_waits_for_one_that_has_failed(cluster, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.distributed.process_workers._GRACE_SECONDS", 0.5)
    group = RayWorkerGroup(cluster, partial(make, 0))
    pids = cluster.processes.pids
    with pytest.raises(ValueError, match="no barrier for me"):
        group.call_all("raise_while_others_wait", 0)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "number, said",
    [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "gave no sign of life for")],
    ids=["killed", "stopped"],
)
def test_a_lost_process_is_named_and_none_is_left(cluster, number, said):
    group = RayWorkerGroup(cluster, partial(make, 0))
    pids, began = cluster.processes.pids, time.monotonic()
    with pytest.raises(WorkerLostError, match=rf"rank 1 of 2 \(process {pids[1]}\) {said}.*end_while_others_wait"):
        group.call_all("end_while_others_wait", 1, number)
    assert time.monotonic() - began < 15
    assert not any(alive(pid) for pid in pids)


def test_a_builder_that_fails_says_where(cluster):
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        RayWorkerGroup(cluster, fails)
    assert "raised on rank" in caught.value.__notes__[0]


def fails(ranks):
    return ranks.rank + "x"
