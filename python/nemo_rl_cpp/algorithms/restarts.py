"""A whole training run from a configuration, begun again where a worker is lost."""

import sys
from itertools import count

from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError


def train(config: TrainMasterConfig) -> None:
    """Builds the run and trains it to its end.

    Where a worker is lost (WorkerLostError: killed, stopped, its machine gone), all others are ended, and the run goes on from
    its newest checkpoint with new workers (without one from its beginning), `cluster.max_restarts` times at most. Every other error
    ends the run, and so does a lost worker where the run had been asked to end.
    """
    run = None
    for restarts in count(1):
        try:
            with build_run(config) as run:
                return run.train()
        except WorkerLostError as error:
            asked_to_end = run is not None and run.services.stop.reason is not None
            if restarts > config.cluster.max_restarts or asked_to_end:
                raise
            config = config.model_copy(
                update={"checkpointing": config.checkpointing.model_copy(update={"resume": "auto"})}
            )
            print(f"warning: {error}; restart {restarts} of {config.cluster.max_restarts}, from the newest checkpoint if there is one", file=sys.stderr, flush=True)  # fmt: skip
