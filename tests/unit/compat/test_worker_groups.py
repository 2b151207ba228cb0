"""Clusters and worker groups as code for several workers calls them."""

import socket

import pytest
from nemo_rl_cpp.compat.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl_cpp.compat.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup


def test_one_device_needs_no_ray():
    init_ray()
    cluster = RayVirtualCluster([1], use_gpus=False, name="train")
    assert cluster.world_size() == 1 and cluster.node_count() == 1 and cluster.get_placement_groups() == []
    address, port = cluster.get_master_address_and_port()
    with socket.socket() as probe:
        probe.bind((address, port))
    assert len(cluster.get_available_addresses_and_ports_batch([(0, 0), (0, 0)])) == 2
    assert cluster.shutdown() and cluster.shutdown()


def test_ports_come_from_the_range():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        cluster = RayVirtualCluster([1], port_range_low=port, port_range_high=port + 1)
        with pytest.raises(RuntimeError, match="master_port_range"):
            cluster.get_master_address_and_port()
    assert cluster.get_master_address_and_port() == ("127.0.0.1", port)


class Worker:
    def __init__(self, base):
        self.base = base

    def add(self, x, y=0):
        return self.base + x + y


def test_worker_group_runs_in_this_process():
    group = RayWorkerGroup(RayVirtualCluster([1]), RayWorkerBuilder(Worker, base=10))
    results = group.get_all_worker_results
    assert results(group.run_all_workers_single_data("add", 1, y=2)) == [13]
    assert results(group.run_all_workers_multiple_data("add", [5], common_kwargs={"y": 1})) == [16]
    assert group.run_single_worker_single_data("add", 0, 3).result() == 13
    assert group.workers[0].base == 10 and group.dp_size == 1
    with pytest.raises(ValueError, match="one entry a worker"):
        group.run_all_workers_multiple_data("add", [1, 2])
    assert group.shutdown() and group.shutdown()
