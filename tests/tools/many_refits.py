"""Repeats refits of the tiny model, from a trainer's process to an engine's, and measures memory, files and threads.

The weights change before every refit, and the engine's digest is compared afterwards."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from nemo_rl_cpp.algorithms.checkpointing import Resume
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.algorithms.parts import make_cluster, make_engine_cluster, make_generation, make_policy, make_tokenizer
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.weight_sync import CollectiveWeights

WORKERS = (
    "cluster.executor=processes", "cluster.gpus_per_node=2", "cluster.cpus_per_worker=1", "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
)  # fmt: skip


ROWS, TOKENS = 4, 8


def batch() -> RaggedBatch:
    """Return a few tokens to train on, so that the weights change."""
    count = ROWS * TOKENS
    tokens = {"input_ids": torch.arange(count) % 10, "advantages": torch.ones(count), "token_mask": torch.ones(count),
              "prev_logprobs": torch.full((count,), -2.0), "generation_logprobs": torch.full((count,), -2.0)}  # fmt: skip
    return RaggedBatch(
        offsets_of(torch.full((ROWS,), TOKENS)), tokens, {"sample_mask": torch.ones(ROWS), "group_id": torch.arange(ROWS)}
    )  # fmt: skip


class Held(NamedTuple):
    """The open files, threads and memory of a process."""

    files: int
    threads: int
    megabytes: float


def held(pid: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) / 1024)


def refit_often(refits: int, *overrides: str) -> tuple[dict[str, Held], dict[str, Held]]:
    """Return what each process holds after a tenth of the refits, and after all refits."""
    config = load_grpo_config("grpo_tiny.yaml", [*WORKERS, *overrides])
    cluster, engines = make_cluster(config), make_engine_cluster(config)
    version = 0
    try:
        tokenizer = make_tokenizer(config.policy)
        policy = make_policy(config, tokenizer, Resume(None, TrainState()), cluster, steps=1)
        generation = make_generation(config, policy, tokenizer, engines)
        refit = CollectiveWeights(policy, generation, lambda: version)
        pids = {"driver": os.getpid(), "trainer": cluster.workers.pids[0], "engine": engines.workers.pids[0]}
        before, digests = {}, set()
        for version in range(refits):
            policy.train(batch(), ClippedPGLossFn(config.loss_fn), gbs=ROWS)
            refit.mark_stale()
            digests.add(refit.sync_weights()["weights/digest"])
            if version == max(refits // 10, 1):
                before = {name: held(pid) for name, pid in pids.items()}
        assert len(digests) == refits, "the weights did not change"
        return before, {name: held(pid) for name, pid in pids.items()}
    finally:
        for each in (engines, cluster):
            each.shutdown()
