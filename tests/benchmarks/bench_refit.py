"""A refit between two processes over Gloo, compared with a plain broadcast of the same bytes, in turns in one run.

    python tests/benchmarks/bench_refit.py
    python tests/benchmarks/bench_refit.py --changed 0.01 0.1 0.3

The weights are float32 tensors of SmolLM2-135M's shapes, 538 MB. A refit includes the manifest, the digests of all
tensors in both processes, and the copy of the weights to their place. A broadcast ends with an unchecked tensor.
`share` is the refit's speed divided by the broadcast's. "read in place" is for processes on one machine; messages
are for other machines.

With `--changed` the weights are bfloat16, 269 MB. These shares of them change between two refits, and `delta` sends
only the changed weights (`policy.refit: delta`)."""

import argparse
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from harness import smollm2
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.launch import rendezvous_store
from nemo_rl_cpp.distributed.ranks import connect
from nemo_rl_cpp.models.generation.interfaces import DEFAULT_BUCKET_BYTES
from nemo_rl_cpp.models.model_folder import read_model_folder
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from sides import options

SHAPES = parameter_shapes(read_model_folder(Path(smollm2())).native())


def weights(fill: float, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Return one flat buffer, as in a model, and its tensors."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    flat = torch.full((sum(sizes),), fill, dtype=dtype)
    return flat, [(name, part.view(shape)) for (name, shape), part in zip(SHAPES.items(), flat.split(sizes))]


def work(rank: int, port: int, args: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Run one of the two processes. Return the seconds of each side's turns, and the bytes of the weights."""
    torch.set_num_threads(args.threads)
    communicator = connect(rank, 2, "127.0.0.1", port, 600.0).communicator
    flat, named = weights(float(rank == 0), torch.bfloat16 if args.changed else torch.float32)
    plain = torch.full_like(flat, float(rank == 0))
    ways = {"refit, read in place": True, f"refit, messages of {DEFAULT_BUCKET_BYTES / 1e6:g} MB": False}
    if rank == 0:
        flat.normal_(generator=torch.Generator().manual_seed(0))
        sides = {
            name: C.RefitPublisher(communicator, DEFAULT_BUCKET_BYTES, in_place=in_place)
            for name, in_place in ways.items()
        }
        run = {name: lambda version, p=p: p.publish(named, version) for name, p in sides.items()}
    else:
        run = dict.fromkeys(ways, C.RefitReceiver(communicator, named).receive)
    changing: dict[str, torch.Tensor] = {}  # separate weights for each, because changes are relative to the last refit
    for share in args.changed:
        name = f"delta, {share:.1%} changed"
        changing[name], own = weights(float(rank == 0), torch.bfloat16)
        if rank == 0:
            changing[name].copy_(flat)
            by_delta = C.RefitPublisher(communicator, DEFAULT_BUCKET_BYTES, delta=True)
            run[name] = lambda version, p=by_delta, own=own: p.publish(own, version)
        else:
            run[name] = C.RefitReceiver(communicator, own).receive
    run = {"broadcast": lambda version: communicator.broadcast(plain, 0, phase="broadcast")} | run
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(args.repeats + 1):
        for name, side in run.items():
            if rank == 0 and name in changing:
                count = int(flat.numel() * float(name.split()[1].rstrip("%")) / 100)
                changing[name][torch.randint(0, flat.numel(), (count,))] *= -1
            communicator.barrier(phase="begin")
            began = time.perf_counter()
            side(turn)
            communicator.barrier(phase="end")
            if turn > 0:  # the first turn touches the memory for the first time
                seconds[name].append(time.perf_counter() - began)
    return seconds, flat.nbytes


def main() -> None:
    args = options(
        __doc__, repeats=7, threads={"type": int, "default": 1, "help": "of each process"},
        changed={"type": float, "nargs": "*", "default": [], "help": "shares of the weights"},
    )  # fmt: skip
    store = rendezvous_store("127.0.0.1", 600.0)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        (seconds, size), _ = pool.map(partial(work, port=store.port, args=args), range(2))
    plain = statistics.median(seconds["broadcast"])
    print(f"{size / 1e6:.0f} MB of {len(SHAPES)} tensors, {args.threads} thread a process, median of {args.repeats}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:30} {median * 1e3:8.0f} ms  [{min(values) * 1e3:.0f}, {max(values) * 1e3:.0f}]  {size / median / 1e9:.2f} GB/s  share {plain / median:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
