import pytest
import torch
import torch.distributed as dist
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed import ranks
from nemo_rl_cpp.distributed.cluster import Cluster, check_device
from nemo_rl_cpp.distributed.ranks import connect

NOWHERE = dict(rank=0, host="127.0.0.1", port=1, deadline=0.1)


def test_cluster_with_one_rank_creates_no_communicator():
    assert connect(size=1, backend="nccl", **NOWHERE).communicator is None


@pytest.mark.parametrize("gpus, numbers", [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])])
def test_ranks_are_assigned_visible_gpus_round_robin(monkeypatch, gpus, numbers):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [ranks._own_gpu(rank).index for rank in range(4)] == numbers == [gpu.index for gpu in chosen]


def test_native_nccl_communication_requires_gpus_and_a_core_built_for_cuda():
    store = dist.PrefixStore("test", dist.HashStore())
    with pytest.raises(ValueError, match="NCCL connects GPUs.*not cpu; on the CPU take Gloo"):
        C.nccl_communicator(store, 0, 2, torch.device("cpu"), 1.0)
    if not C.cuda_compiled:
        with pytest.raises(ValueError, match="built without it.*NEMO_RL_CUDA=on"):
            C.nccl_communicator(store, 0, 2, torch.device("cuda:0"), 1.0)


def test_training_on_several_gpus_is_an_error_that_states_the_reason():
    with pytest.raises(ValueError, match="no training on several has been tried yet.*cluster.device=cpu"):
        Cluster([2], use_gpus=True)


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
    with pytest.raises(ValueError, match="cluster.device is cuda, but torch sees no GPU.*cluster.device=cpu"):
        check_device("cuda")
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: True)
    assert check_device("cuda") == "cuda"
