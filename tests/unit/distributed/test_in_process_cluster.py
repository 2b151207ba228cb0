import socket

import pytest
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster, check_device, init_ray
from nemo_rl_cpp.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup


def test_one_device_needs_no_ray():
    init_ray()
    cluster = RayVirtualCluster([1], use_gpus=False, name="train")
    assert cluster.world_size() == 1 and cluster.node_count() == 1 and cluster.get_placement_groups() == []
    address, port = cluster.get_master_address_and_port()
    with socket.socket() as probe:
        probe.bind((address, port))
    assert len(cluster.get_available_addresses_and_ports_batch([(0, 0), (0, 0)])) == 2
    assert cluster.shutdown() and cluster.shutdown()


@pytest.mark.parametrize("bundles", [[2], [1, 1], [8, 8], [0]])
def test_more_devices_are_an_error_with_the_keys_to_change(bundles):
    with pytest.raises(ValueError, match="cluster.gpus_per_node=1 and cluster.num_nodes=1"):
        RayVirtualCluster(bundles)


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


@pytest.mark.parametrize(
    "usable, use_gpus, precision, device",
    [(True, True, "bfloat16", "cuda"), (True, True, "float32", "cuda"), (True, True, "float64", "cpu"), (True, False, "float32", "cpu"),
     (False, True, "float32", "cpu")],
)  # fmt: skip
def test_models_lie_on_a_gpu_where_one_can_be_used(monkeypatch, usable, use_gpus, precision, device):
    monkeypatch.setattr("nemo_rl_cpp.distributed.virtual_cluster.cuda_usable", lambda: usable)
    assert RayVirtualCluster([1], use_gpus=use_gpus).device(precision) == device


def test_a_gpu_that_cannot_be_used_is_an_error_that_names_the_key(monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.distributed.virtual_cluster.cuda_usable", lambda: False)
    assert check_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="cluster.device is cuda, but torch sees no GPU.*cluster.device=cpu"):
        check_device("cuda")
    monkeypatch.setattr("nemo_rl_cpp.distributed.virtual_cluster.cuda_usable", lambda: True)
    assert check_device("cuda") == "cuda"
