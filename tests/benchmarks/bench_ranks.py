"""Training steps of several processes on this machine: gradients that are added after the backward, beside it, or shared out.

    python tests/benchmarks/bench_ranks.py [--layers 10] [--rounds 9] [--processes 2] [--precision float32]
    python tests/benchmarks/bench_ranks.py --memory [--layers 30]

A model of SmolLM2-135M's shapes with so many layers and random weights; each process trains its half of the samples in `--micro-batches`
micro-batches. Times: all ways take turns in the same processes, on the same weights, and all of them must have the same norm of the
gradient; `waiting` is what a step took beyond the slowest backward. Memory: each way in processes of its own, what a process grows by at
its peak (VmHWM) after the imports; "alone" is one process without others, which has all masters and moments.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from harness import tune_malloc
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_cpp.distributed.worker_groups import RayWorkerGroup
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, canonical_config
from nemo_rl_cpp.models.model_folder import ModelFolder
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
WAYS = {"after": (False, False), "beside": (True, False), "sharded": (True, True)}
ADAMW = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}


def peak_mb() -> float:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class Bench:
    """In a worker: one model, and a trainer for each way."""

    def __init__(self, args, names, ranks):
        tune_malloc()
        self.ranks, self.micro_batches, self.checkpoint, self.before = (
            ranks,
            args.micro_batches,
            args.checkpoint,
            peak_mb(),
        )
        folder = ModelFolder(canonical_config(TINY_CONFIG | SMOLLM2 | {"num_hidden_layers": args.layers}), None, seed=1)
        self.model = C.DecoderModel(folder.native(), getattr(torch, args.precision), True)
        self.model.masters.normal_(std=0.02, generator=torch.Generator().manual_seed(3))
        self.model.masters_changed()
        self.trainers = {}
        for name in names:
            beside, sharded = WAYS.get(name, (False, False))
            self.trainers[name] = C.Trainer(
                self.model, ranks.communicator, ranks.beside() if beside else None, sharded and ranks.size > 1
            )
        count, length = args.samples, args.length
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(0, SMOLLM2["vocab_size"], (count, length), generator=generator)
        mask = torch.ones(count, length)
        batch = {
            "input_ids": ids,
            "input_lengths": torch.full((count,), length),
            "token_mask": mask,
            "sample_mask": torch.ones(count),
        }
        self.batch = RaggedBatch.of(batch)
        each = count // ranks.size
        rows = list(range(ranks.rank * each, (ranks.rank + 1) * each))
        wanted = torch.ones(count * length, dtype=torch.bool)
        wanted[self.batch.starts] = False
        batching = MicroBatching(
            max_samples=each // self.micro_batches, max_tokens=0, share_prefix=False, checkpoint=args.checkpoint
        )
        self.native, self.plan = plan(self.batch, wanted, rows, batching)
        self.slope = torch.where(wanted, -1.0 / count / length, 0.0)

    def step(self, name):
        """(seconds until the last backward has ended, seconds of the step, norm)."""
        trainer = self.trainers[name]
        if self.ranks.communicator is not None:
            self.ranks.communicator.barrier(phase="begin")
        began = time.perf_counter()
        trainer.zero_grad()
        out = torch.zeros(self.batch.num_tokens)
        for i, rows in enumerate(self.plan, 1):
            trainer.forward(self.native, rows, 1.0, False, True, self.checkpoint, out)
            if i == len(self.plan):
                trainer.begin_sum()
            trainer.backward(self.slope)
        trained = time.perf_counter() - began
        norm = trainer.step(**ADAMW).grad_norm
        return trained, time.perf_counter() - began, norm

    def grown(self):
        return peak_mb() - self.before


def bench(args, names, ranks):
    return Bench(args, names, ranks)


def group_of(args, names, processes):
    settings = ClusterConfig(executor="processes", gpus_per_node=processes, cpus_per_worker=args.threads)
    cluster = RayVirtualCluster([processes], use_gpus=False, settings=settings)
    return cluster, RayWorkerGroup(cluster, partial(bench, args, names))


def times(args) -> None:
    cluster, group = group_of(args, list(WAYS), args.processes)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    waiting: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(args.rounds + 1):
        norms = set()
        for name in WAYS if turn % 2 else reversed(WAYS):
            told = group.call_all("step", name)
            norms |= {norm for *_, norm in told}
            if turn > 0:
                seconds[name].append(max(step for _, step, _ in told))
                waiting[name].append(max(step for _, step, _ in told) - max(trained for trained, *_ in told))
        print(f"round {turn}: norms {norms}")
    for name in WAYS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["after"])]
        print(
            f"{name:8} {statistics.median(seconds[name]):7.3f} s a step [{min(seconds[name]):.3f}, {max(seconds[name]):.3f}], "
            f"{statistics.median(waiting[name]):.3f} s behind the backward, {statistics.median(ratios):.3f} of 'after' in the same round"
        )
    cluster.shutdown()


def memory(args) -> None:
    for name, processes in (("alone", 1), *((name, args.processes) for name in WAYS)):
        cluster, group = group_of(args, [name], processes)
        for _ in range(2):
            group.call_all("step", name)
        print(f"{name:8} {', '.join(f'{value:.0f} MB' for value in group.call_all('grown'))}")
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", action="store_true", help="activations are computed again")
    args = parser.parse_args()
    memory(args) if args.memory else times(args)


if __name__ == "__main__":
    main()
