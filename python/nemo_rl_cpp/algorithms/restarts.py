"""A whole training run from a configuration, begun again where a worker is lost."""

import sys
from itertools import count

from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError


def train(config: TrainMasterConfig) -> None:
    """Builds the run and trains it to its end.

    Where a worker is lost (WorkerLostError: killed, stopped, its machine gone), all others are ended, and the run goes on from
    its newest checkpoint with new workers, `cluster.max_restarts` times at most. Every other error ends the run.
    """
    for restarts in count(1):
        try:
            with build_run(config) as run:
                return run.train()
        except WorkerLostError as error:
            if restarts > config.cluster.max_restarts:
                raise
            print(f"warning: {error}; restart {restarts} of {config.cluster.max_restarts}, from the newest checkpoint", file=sys.stderr, flush=True)  # fmt: skip
