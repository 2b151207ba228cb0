import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def exchange(communicator, device, dtype):
    """Run every collective operation between all ranks, and check its result."""
    rank, size = communicator.rank, communicator.size
    of_rank = lambda r: torch.arange(12, device=device).add(10 * r).to(dtype)
    parts = of_rank(rank).repeat(size, 1).contiguous()
    all_parts, dealt, told = torch.zeros_like(parts), torch.zeros_like(parts), of_rank(rank)
    communicator.all_gather(all_parts, of_rank(rank), phase="gather")
    communicator.all_to_all(dealt, parts, phase="deal")
    wanted = torch.stack([of_rank(r) for r in range(size)])
    assert torch.equal(all_parts, wanted) and torch.equal(dealt, wanted)
    communicator.broadcast(told, root=size - 1, phase="tell")
    assert torch.equal(told, of_rank(size - 1))
    communicator.barrier(phase="all are here")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nccl_collectives_work_with_one_rank(dtype):
    communicator = C.nccl_communicator(dist.HashStore(), 0, 1, torch.device("cuda:0"), 60.0)
    exchange(communicator, torch.device("cuda:0"), dtype)


def test_nccl_collective_waits_for_earlier_work_on_its_cuda_stream():
    communicator = C.nccl_communicator(dist.HashStore(), 0, 1, torch.device("cuda:0"), 60.0)
    a = torch.full((2048, 2048), 1 / 2048, device="cuda:0")
    for _ in range(50):
        a = a @ torch.full_like(a, 2 / 2048)  # twice as large, exactly
    out = torch.zeros(1, 2048, 2048, device="cuda:0")
    communicator.all_gather(out, a, phase="gather")
    assert torch.equal(out[0].cpu(), torch.full((2048, 2048), 2.0**50 / 2048))


def test_nccl_rendezvous_timeout_error_names_rank_and_phase():
    with pytest.raises(C.TimedOut, match="rank 0 of 2: meeting the other ranks failed after") as caught:
        C.nccl_communicator(dist.HashStore(), 0, 2, torch.device("cuda:0"), 3.0)
    assert (caught.value.rank, caught.value.phase) == (0, "meeting the other ranks") and caught.value.seconds >= 3.0
    C.nccl_communicator(dist.HashStore(), 0, 1, torch.device("cuda:0"), 60.0).barrier(phase="the GPU still works")


class OnGpus:
    """An object in a worker process that communicates by NCCL."""

    def __init__(self, ranks):
        self.communicator = ranks.communicator

    def exchange(self):
        for dtype in DTYPES:
            exchange(self.communicator, torch.device("cuda"), dtype)
            exchange(self.communicator, torch.device("cpu"), dtype)  # by Gloo
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def round(self):
        """Send a message from rank 0 to rank 1 and back."""
        message, rank = torch.full((1 << 20,), 1.5, device="cuda"), self.communicator.rank
        self.communicator.send(message, to=1, phase="there") if rank == 0 else self.communicator.receive(message.zero_(), 0, phase="there")  # fmt: skip
        message += rank
        self.communicator.receive(message, 1, phase="back") if rank == 0 else self.communicator.send(message, to=0, phase="back")  # fmt: skip
        return message.unique().tolist()

    def wait_alone(self):
        if self.communicator.rank == 0:
            self.communicator.broadcast(torch.ones(4, device="cuda"), root=1, phase="alone")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_collectives_work_with_two_ranks_and_time_out_if_one_rank_is_missing():
    settings = ClusterConfig(executor="processes", cpus_per_worker=1, communication_timeout_s=5.0)
    cluster = Cluster([2], settings=settings)
    try:
        group = WorkerGroup(cluster, partial(OnGpus))
        assert len(set(group.call_all("exchange"))) == 2
        assert group.call_all("round") == [[2.5], [2.5]]
        with pytest.raises(C.TimedOut, match="rank 0 of 2: alone failed after"):
            group.call_all("wait_alone")
    finally:
        cluster.shutdown()
