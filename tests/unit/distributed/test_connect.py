"""What connects ranks: the choice of a back end, and what is refused before anybody waits."""

import pytest
import torch
import torch.distributed as dist
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed import ranks
from nemo_rl_cpp.distributed.cluster import Cluster
from nemo_rl_cpp.distributed.ranks import connect

NOWHERE = dict(rank=0, host="127.0.0.1", port=1, deadline=0.1)


def test_single_rank_gets_no_communicator():
    assert connect(size=1, backend="nccl", **NOWHERE).communicator is None


@pytest.mark.parametrize("gpus, numbers", [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])])
def test_ranks_are_assigned_visible_gpus_round_robin(monkeypatch, gpus, numbers):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [ranks._own_gpu(rank).index for rank in range(4)] == numbers == [gpu.index for gpu in chosen]


def test_native_nccl_requires_gpus_and_a_cuda_build():
    store = dist.PrefixStore("test", dist.HashStore())
    with pytest.raises(ValueError, match="NCCL connects GPUs.*not cpu; on the CPU take Gloo"):
        C.nccl_communicator(store, 0, 2, torch.device("cpu"), 1.0)
    if not C.cuda_compiled:
        with pytest.raises(ValueError, match="built without it.*NEMO_RL_CUDA=on"):
            C.nccl_communicator(store, 0, 2, torch.device("cuda:0"), 1.0)


def test_runs_on_several_gpus_are_rejected_with_the_reason():
    with pytest.raises(ValueError, match="no training on several has been tried yet.*cluster.device=cpu"):
        Cluster([2], use_gpus=True)
