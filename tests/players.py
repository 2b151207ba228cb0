"""An object in a worker. Each method is one way of working together with the other ranks, or of failing."""

import os
import threading
from functools import partial

import pytest
import torch
from nemo_rl_cpp.distributed.cluster import WorkerGroup
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError


class Player:
    def __init__(self, base, ranks):
        self.base, self.ranks = base, ranks

    def number(self, add):
        return self.base + self.ranks.rank + add

    def size_of(self, data):
        return len(data)

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

    def surroundings(self, name):
        return threading.current_thread() is threading.main_thread(), os.environ.get(name)

    def place(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], self.ranks.sharers, self.ranks.sum(self.ranks.rank)

    def tell(self, count, on_told=None):
        for i in range(count):
            on_told(self.ranks.rank, i)
        return count


def make(base, ranks):
    return Player(base, ranks)


def lose(cluster, number, said):
    """Send a signal to rank 1 while rank 0 waits for it, and return the pids of both ranks.

    Assert that the error names the rank, its process, what happened (`said`) and the call."""
    group = WorkerGroup(cluster, partial(make, 0))
    pids = cluster.workers.pids
    with pytest.raises(WorkerLostError, match=rf"rank 1 of 2 \(process {pids[1]}\) {said}.*end_while_others_wait"):
        group.call_all("end_while_others_wait", 1, number)
    return pids
