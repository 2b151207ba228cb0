"""An engine in a worker, which receives refits from a trainer in the test's process."""

import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ranks import connect

SIZE = 1000


class Engine:
    def __init__(self, ranks):
        self.weights, self.receiver = torch.zeros(SIZE), None

    def join(self, port, deadline):
        communicator = connect(1, 2, "127.0.0.1", port, deadline).communicator
        self.receiver = C.RefitReceiver(communicator, [("w", self.weights)])

    def receive(self, version):
        return self.receiver.receive(version).bytes

    def total(self):
        return float(self.weights.sum())


def make(ranks):
    return Engine(ranks)
