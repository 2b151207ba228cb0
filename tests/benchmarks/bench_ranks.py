"""Training steps in two processes of this machine: gradients summed after or during the backward pass, or sharded.

    python tests/benchmarks/bench_ranks.py [--layers 10] [--rounds 9] [--precision float32]
    python tests/benchmarks/bench_ranks.py --memory [--layers 30]

The model has SmolLM2-135M's shapes, `--layers` layers and random weights. Each process trains its share of the samples
in one micro-batch. Times: all ways take turns in the same processes, on the same weights, and must have
the same gradient norm; `waiting` is the time of a step beyond the slowest backward pass. Memory: each way runs in
separate processes, and the result is the peak growth of a process (VmHWM) after the imports. "alone" is a single
process, which holds all master weights and moments."""

import statistics
from functools import partial

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from sides import choice, options
from training_ranks import WAYS, bench

PROCESSES = 2


def group_of(args, names, processes):
    settings = ClusterConfig(executor="processes", gpus_per_node=processes, cpus_per_worker=args.threads)
    cluster = Cluster([processes], use_gpus=False, settings=settings)
    return cluster, WorkerGroup(cluster, partial(bench, args, names))


def times(args) -> None:
    cluster, group = group_of(args, list(WAYS), PROCESSES)
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
        if len(norms) != 1:
            raise RuntimeError(f"the ways have other norms of the gradient: {norms}")
    for name in WAYS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["after"])]
        print(
            f"{name:8} {statistics.median(seconds[name]):7.3f} s a step [{min(seconds[name]):.3f}, {max(seconds[name]):.3f}], "
            f"{statistics.median(waiting[name]):.3f} s behind the backward, {statistics.median(ratios):.3f} of 'after' in the same round"
        )
    cluster.shutdown()


def memory(args) -> None:
    for name, processes in (("alone", 1), *((name, PROCESSES) for name in WAYS)):
        cluster, group = group_of(args, [name], processes)
        for _ in range(2):
            group.call_all("step", name)
        print(f"{name:8} {', '.join(f'{value:.0f} MB' for value in group.call_all('grown'))}")
        cluster.shutdown()


def main() -> None:
    args = options(
        __doc__, memory=False, layers=10, samples=8, length=128, rounds=9, precision=choice("float32", "bfloat16"),
        threads={"type": int, "default": 1, "help": "of each process"},
    )  # fmt: skip
    memory(args) if args.memory else times(args)


if __name__ == "__main__":
    main()
