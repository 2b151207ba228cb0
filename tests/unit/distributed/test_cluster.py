from functools import partial

import fake_gpus
import nemo_rl_cpp
import pytest
import torch
import torch.distributed as dist
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup, check_device
from nemo_rl_cpp.distributed.ranks import connect
from nemo_rl_cpp.generate import TextGenerator
from players import make

NOWHERE = dict(rank=0, host="127.0.0.1", port=1, deadline=0.1)


def test_cluster_with_one_rank_creates_no_communicator():
    assert connect(size=1, **NOWHERE).communicator is None
    with pytest.raises(ValueError, match="torch sees none: set cluster.device=cpu"):
        connect(size=1, backend="nccl", **NOWHERE)


@pytest.mark.slow
def test_each_worker_sees_one_gpu_and_workers_may_share_it(tmp_path, monkeypatch):
    fake_gpus.install(tmp_path, monkeypatch, "5,7")
    cluster = Cluster([3], use_gpus=True, settings=ClusterConfig(executor="processes", cpus_per_worker=1), first_gpu=1)
    try:
        assert WorkerGroup(cluster, partial(make, 0)).call_all("place") == [("7", 2, 3.0), ("5", 1, 3.0), ("7", 2, 3.0)]
    finally:
        cluster.shutdown()


def test_native_nccl_communication_requires_gpus_and_a_core_built_for_cuda():
    store = dist.PrefixStore("test", dist.HashStore())
    with pytest.raises(ValueError, match="NCCL connects GPUs.*not cpu; on the CPU take Gloo"):
        C.nccl_communicator(store, 0, 2, torch.device("cpu"), 1.0)
    if not C.cuda_compiled:
        with pytest.raises(ValueError, match="built without it.*NEMO_RL_CUDA=on"):
            C.nccl_communicator(store, 0, 2, torch.device("cuda:0"), 1.0)


@pytest.mark.parametrize(
    "usable, use_gpus, precision, device",
    [(True, True, "bfloat16", "cuda"), (True, True, "float32", "cuda"), (True, True, "float64", "cpu"), (True, False, "float32", "cpu"),
     (False, True, "float32", "cpu")],
)  # fmt: skip
def test_models_are_placed_on_a_usable_gpu_unless_they_are_float64(monkeypatch, usable, use_gpus, precision, device):
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: usable)
    assert Cluster([1], use_gpus=use_gpus).device(precision) == device


def test_error_for_an_unusable_gpu_names_the_configuration_key_of_the_device(monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: False)
    assert check_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="cluster.device is cuda, but torch sees no GPU.*set it to cpu"):
        check_device("cuda")
    for load in (lambda name: nemo_rl_cpp.load(name, device="cuda"), lambda name: TextGenerator(name, device="cuda")):
        with pytest.raises(ValueError, match="device is cuda, but torch sees no GPU"):
            load("smollm2-135m-instruct")
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: True)
    assert check_device("cuda") == "cuda"
