"""A refit between two processes over Gloo, compared with a plain broadcast of the same bytes, in turns in one run.

    python tests/benchmarks/bench_refit.py
    python tests/benchmarks/bench_refit.py --buckets 4 8 32 --repeats 9
    python tests/benchmarks/bench_refit.py --changed 0.01 0.1 0.3

The weights are float32 tensors of SmolLM2-135M's shapes, 538 MB. A refit includes the manifest, the digests of all
tensors in both processes, and the copy of the weights to their place. A broadcast ends with an unchecked tensor.
`share` is the refit's speed divided by the broadcast's. "read in place" is for processes on one machine; messages, of
`--buckets` MB, are for other machines.

With `--changed` the weights are bfloat16, 269 MB. These shares of them change between two refits, and `delta` sends
only the changed weights (`policy.refit: delta`)."""

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.launch import rendezvous_store
from nemo_rl_cpp.distributed.ranks import connect
from nemo_rl_cpp.models.generation.interfaces import DEFAULT_BUCKET_BYTES
from sides import options

HIDDEN, INTERMEDIATE, KEYS, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30


def shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Return SmolLM2-135M's shapes."""
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        found += [
            (f"model.layers.{layer}.{name}.weight", shape)
            for name, shape in (
                ("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (KEYS, HIDDEN)), ("self_attn.v_proj", (KEYS, HIDDEN)),
                ("self_attn.o_proj", (HIDDEN, HIDDEN)), ("mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
                ("mlp.up_proj", (INTERMEDIATE, HIDDEN)), ("mlp.down_proj", (HIDDEN, INTERMEDIATE)),
                ("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)),
            )
        ]  # fmt: skip
    return [*found, ("model.norm.weight", (HIDDEN,))]


def weights(fill: float, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """Return one flat buffer, as in a model, and its tensors."""
    sizes = [torch.Size(shape).numel() for _, shape in shapes()]
    flat = torch.full((sum(sizes),), fill, dtype=dtype)
    return flat, [(name, part.view(shape)) for (name, shape), part in zip(shapes(), flat.split(sizes))]


def work(rank: int, port: int, args: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Run one of the two processes. Return the seconds of each side's turns, and the bytes of the weights."""
    torch.set_num_threads(args.threads)
    communicator = connect(rank, 2, "127.0.0.1", port, 600.0).communicator
    flat, named = weights(float(rank == 0), torch.bfloat16 if args.changed else torch.float32)
    plain = torch.full_like(flat, float(rank == 0))
    messages = {megabytes: f"refit, messages of {megabytes:g} MB" for megabytes in args.buckets}
    if rank == 0:
        flat.normal_(generator=torch.Generator().manual_seed(0))
        sides = {"refit, read in place": C.RefitPublisher(communicator, DEFAULT_BUCKET_BYTES)}
        for megabytes, name in messages.items():
            sides[name] = C.RefitPublisher(communicator, int(megabytes * 1e6), in_place=False)
        run = {name: lambda version, p=p: p.publish(named, version) for name, p in sides.items()}
    else:
        receiver = C.RefitReceiver(communicator, named)  # the receiver works for every bucket size
        run = dict.fromkeys(("refit, read in place", *messages.values()), receiver.receive)
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
        __doc__, buckets=[DEFAULT_BUCKET_BYTES / 1e6], repeats=7, threads={"type": int, "default": 1, "help": "of each process"},
        changed={"type": float, "nargs": "*", "default": [], "help": "shares of the weights"},
    )  # fmt: skip
    store = rendezvous_store("127.0.0.1", 600.0)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        (seconds, size), _ = pool.map(partial(work, port=store.port, args=args), range(2))
    plain = statistics.median(seconds["broadcast"])
    print(f"{size / 1e6:.0f} MB of {len(shapes())} tensors, {args.threads} thread a process, median of {args.repeats}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:30} {median * 1e3:8.0f} ms  [{min(values) * 1e3:.0f}, {max(values) * 1e3:.0f}]  {size / median / 1e9:.2f} GB/s  share {plain / median:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
