import os
import signal
import time
from functools import partial

import fake_gpus
import pytest
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed import ray_workers
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from players import lose, make
from processes import wait_until_gone

pytestmark = pytest.mark.slow
ray = ray_workers.ray_module()


@pytest.fixture(scope="module", autouse=True)
def started_ray():
    """Start one Ray cluster for all tests of this file; workers use a Ray cluster that is running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", partial(ray.init, num_gpus=2))
        assert ray_workers.start_ray(3) and not ray_workers.start_ray(3)
    yield
    ray.shutdown()


@pytest.fixture
def cluster():
    settings = ClusterConfig(executor="ray", cpus_per_worker=1, worker_timeout_s=4.0)
    made = Cluster([2], use_gpus=False, settings=settings)
    yield made
    made.shutdown()


def test_ray_actor_calls_return_results_and_the_error_for_a_killed_actor_names_the_actor(cluster, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "a key")  # set after Ray was started
    group = WorkerGroup(cluster, partial(make, 10))
    assert group.call_all("number", 5) == [15, 16]
    assert group.call_all("total") == [3.0, 3.0]
    assert group.call_all("surroundings", "JUDGE_KEY") == [(True, "a key")] * 2
    whole, nothing = group.call_all("shards", 3)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and nothing is None
    with pytest.raises(ValueError, match="rank 1 does not like this") as caught:
        group.call_all("fail_on", 1)
    assert "raised on rank 1 of 2" in caught.value.__notes__[0]
    assert group.call_all("number", 1) == [11, 12]
    assert ray.is_initialized()
    is_named_and_none_is_left(cluster, signal.SIGKILL, "is gone")


def test_error_for_a_hanging_ray_actor_names_the_actor_and_no_process_remains(cluster):
    WorkerGroup(cluster, partial(make, 0))  # the workers are there
    is_named_and_none_is_left(cluster, signal.SIGSTOP, "gave no sign of life for")


def is_named_and_none_is_left(cluster, number, said):
    began = time.monotonic()
    pids = lose(cluster, number, said)
    assert time.monotonic() - began < 30
    assert not wait_until_gone(pids, 10.0)


@pytest.mark.parametrize(
    "number, said",
    [(signal.SIGKILL, r"rank 0 of 1 is gone .*; it was doing: starting"), (signal.SIGSTOP, "rank 0 of 1 has not answered for 16 s: it is stopped")],
    ids=["killed", "stopped"],
)  # fmt: skip
def test_error_for_a_ray_actor_lost_at_startup_names_it_and_no_process_remains(monkeypatch, tmp_path, number, said):
    class Lost(ray_workers.ActorWorker):
        def __init__(self):
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ray_workers, "_START_SECONDS", 16.0)
    monkeypatch.setattr(ray_workers, "ActorWorker", Lost)
    cluster = Cluster([1], use_gpus=False, settings=ClusterConfig(executor="ray", cpus_per_worker=1))
    with pytest.raises(WorkerLostError, match=said):
        WorkerGroup(cluster, partial(make, 0))
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert pids and not wait_until_gone(pids, 10.0)


def test_each_ray_actor_sees_one_gpu(tmp_path, monkeypatch):
    fake_gpus.install(tmp_path, monkeypatch, "0,1")
    cluster = Cluster([2], settings=ClusterConfig(executor="ray", cpus_per_worker=1))
    try:
        assert sorted(WorkerGroup(cluster, partial(make, 0)).call_all("place")) == [("0", 1, 1.0), ("1", 1, 1.0)]
    finally:
        cluster.shutdown()


def test_ray_cluster_with_too_few_cpus_or_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr(ray_workers, "_PLACES_SECONDS", 1.0)
    settings = ClusterConfig(executor="ray", cpus_per_worker=1000)
    cluster = Cluster([2], use_gpus=False, settings=settings)
    with pytest.raises(ValueError, match="no room for 2 workers of 1000 CPUs within 1 s: it has"):
        WorkerGroup(cluster, partial(make, 0))
    cluster = Cluster([3], settings=ClusterConfig(executor="ray", cpus_per_worker=1))
    with pytest.raises(ValueError, match=r"no room for 3 workers of 1 CPUs and 1 GPUs .* it has \d+ CPUs and 2 GPUs"):
        WorkerGroup(cluster, partial(make, 0))
