"""Packed attention forward and backward against torch's SDPA; decode over the blocked cache against memory bandwidth.

    uv run python tests/benchmarks/bench_attention.py [--threads 1] [--repeats 7] [--json out.json]

Sides of a pair alternate within one run; figures are medians. GFLOP/s count the causal half: 4*H operations a scored
pair and head forward, 10*H backward. The limit of decode is a memory copy of the same run.
"""

import argparse
import json
import platform
import statistics
import time

import torch
from nemo_rl_cpp._native import C

MODELS = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-0.5B": (14, 2, 64), "Qwen3-0.6B": (16, 8, 128)}


def alternate(repeats, *functions):
    """Median seconds of each function, the sides taking turns."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def bench_packed(model, shape, dtype, length, count, repeats):
    n, k, h = shape
    heads, tokens = C.AttentionHeads(n, k, h, h**-0.5), length * count
    qkv = torch.randn(tokens, (n + 2 * k) * h).to(dtype)
    d_out = torch.randn(tokens, n * h).to(dtype)
    sequences = [(i * length, length, 0, 0) for i in range(count)]
    out, lse = C.attention_forward(qkv, sequences, heads)

    split = qkv.view(count, length, n + 2 * k, h).transpose(1, 2)
    leaves = [x.contiguous().requires_grad_() for x in split.split([n, k, k], 1)]
    d_torch = d_out.view(count, length, n, h).transpose(1, 2).contiguous()

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    graph = sdpa()
    seconds = alternate(
        repeats,
        lambda: C.attention_forward(qkv, sequences, heads),
        lambda: sdpa().detach(),
        lambda: C.attention_backward(qkv, out, d_out, lse, sequences, heads),
        lambda: torch.autograd.grad(graph, leaves, d_torch, retain_graph=True),
    )
    pairs = n * length * (length + 1) / 2 * count
    rows = []
    for name, flops, ours, theirs in [("forward", 4 * h, *seconds[:2]), ("backward", 10 * h, *seconds[2:])]:
        rows.append({
            "what": name, "model": model, "dtype": str(dtype).removeprefix("torch."), "tokens": f"{count}x{length}",
            "ms": ours * 1e3, "gflops": flops * pairs / ours / 1e9, "sdpa_ms": theirs * 1e3, "ratio": theirs / ours,
        })  # fmt: skip
    return rows


def bench_decode(model, shape, dtype, batch, length, repeats):
    n, k, h = shape
    blocks = -(-length // C.KEY_TILE)
    cache = torch.randn(batch * blocks, k, 2, h * C.KEY_TILE).to(dtype)
    order = torch.randperm(batch * blocks).tolist()
    slices = [(i, 1, length - 1, order[i * blocks : (i + 1) * blocks]) for i in range(batch)]
    qkv = torch.randn(batch, (n + 2 * k) * h).to(dtype)
    heads = C.AttentionHeads(n, k, h, h**-0.5)
    target = torch.empty_like(cache)
    ours, copy = alternate(
        4 * repeats, lambda: C.attention_paged(qkv, slices, heads, cache), lambda: target.copy_(cache)
    )
    read, copied = 2 * batch * length * k * h * cache.element_size(), 2 * cache.nbytes
    return {
        "what": "decode", "model": model, "dtype": str(dtype).removeprefix("torch."),
        "tokens": f"{batch}x1 over {length}",
        "us": ours * 1e6, "gb_per_s": read / ours / 1e9, "copy_gb_per_s": copied / copy / 1e9,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chosen = MODELS if args.model == "all" else {args.model: MODELS[args.model]}
    header = {"machine": platform.processor() or platform.machine(), "capability": C.cpu_capability(),
              "torch": torch.__version__, "threads": args.threads, "repeats": args.repeats}  # fmt: skip
    print(header)
    rows = []
    for model, shape in chosen.items():
        for dtype in (torch.float32, torch.bfloat16):
            for length, count in [(2048, 1), (512, 4), (128, 16)]:
                for row in bench_packed(model, shape, dtype, length, count, args.repeats):
                    rows.append(row)
                    print("{what:9} {model:13} {dtype:9} {tokens:>8} {ms:8.2f} ms {gflops:6.0f} GFLOP/s"
                          " | sdpa {sdpa_ms:8.2f} ms | x{ratio:.2f}".format(**row), flush=True)  # fmt: skip
            for batch, length in [(1, 100), (1, 2000), (16, 100), (64, 100), (64, 500)]:
                row = bench_decode(model, shape, dtype, batch, length, args.repeats)
                rows.append(row)
                print("{what:9} {model:13} {dtype:9} {tokens:>14} {us:8.1f} us {gb_per_s:6.1f} GB/s read | copy"
                      " {copy_gb_per_s:5.1f} GB/s".format(**row), flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**header, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
