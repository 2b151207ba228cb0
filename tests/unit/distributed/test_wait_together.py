import threading

import pytest
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed import worker_calls
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError, wait_together


class Cluster:
    """A replacement for a cluster's workers whose `wait` returns `values`, raises `error`, or hangs until `kill`."""

    def __init__(self, values=None, error=None, hangs=False):
        self.values, self.error, self.hangs, self.killed = values, error, hangs, threading.Event()

    def wait(self, calls):
        if self.hangs:
            self.killed.wait(30)
            raise WorkerLostError("was ended by SIGKILL")
        if self.error is not None:
            raise self.error
        return self.values

    def kill(self):
        self.killed.set()


def test_waiting_for_two_worker_clusters_returns_the_results_of_both():
    assert wait_together((Cluster([1, 2]), []), (Cluster([3]), [])) == [[1, 2], [3]]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("reason, consequence", [
    (WorkerLostError("engine worker 0 of 1"), RuntimeError("other")),
    (C.RefitRefused("norm has another digest"), C.PeerRefused("rank 1 has refused")),
    (ValueError("mine"), C.PeerRefused("rank 1 has refused")),
])  # fmt: skip
def test_waiting_for_two_worker_clusters_raises_the_root_cause_of_a_failure(order, reason, consequence):
    clusters = [Cluster(error=reason), Cluster(error=consequence)][::order]
    with pytest.raises(type(reason), match=str(reason)):
        wait_together(*((cluster, []) for cluster in clusters))


def test_failure_of_one_worker_cluster_terminates_waiting_workers_of_the_other_cluster(monkeypatch):
    monkeypatch.setattr(worker_calls, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(worker_calls, "WAIT_SECONDS", 0.01)
    waits = Cluster(hangs=True)
    with pytest.raises(ValueError, match="mine"):
        wait_together((waits, []), (Cluster(error=ValueError("mine")), []))
    assert waits.killed.is_set()
