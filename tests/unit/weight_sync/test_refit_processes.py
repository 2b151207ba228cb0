import os
import signal
import sys
import time
from pathlib import Path

import pytest
import refit_players
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.launch import rendezvous_store
from nemo_rl_cpp.distributed.ranks import connect

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from many_refits import refit_often

pytestmark = pytest.mark.slow
DEADLINE = 2.0


@pytest.fixture
def cluster(forked_workers):
    made = Cluster(
        [1], use_gpus=False, settings=ClusterConfig(executor="processes", cpus_per_worker=1), role="engine worker"
    )
    yield made
    made.shutdown()


@pytest.fixture
def pair(cluster):
    """Return (the publisher of weights in this process, the worker group of the one engine)."""
    group, store = WorkerGroup(cluster, refit_players.make), rendezvous_store("127.0.0.1", DEADLINE)
    joining = group.run_all_workers_single_data("join", store.port, DEADLINE)
    communicator = connect(0, 2, "127.0.0.1", store.port, DEADLINE).communicator
    cluster.workers.wait(joining)
    yield C.RefitPublisher(communicator, 700), group


def weights(value, size=refit_players.SIZE):
    return [("w", torch.full((size,), value))]


def test_rejected_weight_transfer_keeps_the_old_weights_and_the_next_transfer_succeeds(pair):
    publisher, group = pair
    for version, sent, total in ((1, weights(1.0), 1000.0), (2, weights(2.0, 8), 1000.0), (3, weights(3.0), 3000.0)):
        (taking,) = group.run_all_workers_single_data("receive", version)
        if len(sent[0][1]) == refit_players.SIZE:
            assert publisher.publish(sent, version).buckets == (6 if version == 1 else 1)  # then it is read in place
            assert taking.result(10) == 4000
        else:
            with pytest.raises(C.PeerRefused, match="refit of version 2 was refused by rank 1"):
                publisher.publish(sent, version)
            with pytest.raises(C.RefitRefused, match=r"old weights stay: w is \[8\] Float, \[1000\] Float") as caught:
                taking.result(10)
            assert "raised on engine worker 0 of 1" in caught.value.__notes__[0]
        assert group.call_all("total") == [total]


def test_weight_transfer_to_an_unresponsive_engine_is_an_error_within_the_deadline(pair):
    began = time.monotonic()
    with pytest.raises(C.TimedOut, match="refit of version 7") as caught:
        pair[0].publish(weights(1.0), 7)
    assert time.monotonic() - began < 3 * DEADLINE
    assert caught.value.rank == 0 and "refit of version 7" in caught.value.phase and caught.value.seconds > 0


def test_weight_transfer_to_a_killed_engine_immediately_raises_an_error_about_a_lost_peer(pair, cluster):
    began = time.monotonic()
    os.kill(cluster.workers.pids[0], signal.SIGKILL)
    with pytest.raises(C.PeerLost, match="refit of version 7"):
        pair[0].publish(weights(1.0), 7)
    assert time.monotonic() - began < DEADLINE


def test_repeated_weight_transfers_do_not_increase_memory_open_files_or_threads():
    before, after = refit_often(60)
    for name, now in after.items():
        assert now.files <= before[name].files and now.threads <= before[name].threads
        assert now.megabytes < before[name].megabytes + 8
