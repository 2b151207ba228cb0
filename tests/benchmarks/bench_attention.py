"""Packed attention, forward and backward, compared with torch's SDPA; decode attention compared with memory bandwidth.

    uv run python tests/benchmarks/bench_attention.py [--model Qwen3-0.6B] [--threads 1] [--repeats 7] [--json out.json]

The two sides alternate within one run, and results are medians. GFLOP/s count the causal half: 4*H operations per
scored pair and head forward, 10*H backward. Decode reads the blocked KV cache; its limit is a memory copy in the same
run."""

import torch
from harness import Report, alternate, begin
from nemo_rl_cpp._native import C
from sides import choice

MODELS = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-0.5B": (14, 2, 64), "Qwen3-0.6B": (16, 8, 128)}


def measure_packed(report: Report, model: str, dtype: torch.dtype, length: int, count: int) -> None:
    """Measure forward and backward of `count` sequences of `length` tokens."""
    n, k, h = MODELS[model]
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
    sides = {
        "forward, ours": lambda: C.attention_forward(qkv, sequences, heads),
        "forward, sdpa": lambda: sdpa().detach(),
        "backward, ours": lambda: C.attention_backward(qkv, out, d_out, lse, sequences, heads),
        "backward, sdpa": lambda: torch.autograd.grad(graph, leaves, d_torch, retain_graph=True),
    }
    times = alternate(sides, report.args.repeats, warmup=1)
    pairs = n * length * (length + 1) / 2 * count
    for side, time in times.items():
        way = side.split(",")[0]
        flops = (4 if way == "forward" else 10) * h * pairs
        ratio = time.median / times[f"{way}, ours"].median
        what = f"{model} {str(dtype).removeprefix('torch.')} {count}x{length}"
        report.add(what, side, time, gflops=flops / time.median / 1e9, ratio=ratio)


def measure_decode(report: Report, model: str, dtype: torch.dtype, batch: int, length: int) -> None:
    """Measure a decode step of `batch` sequences of `length` tokens."""
    n, k, h = MODELS[model]
    blocks = -(-length // C.KEY_TILE)
    cache = torch.randn(batch * blocks, k, 2, h * C.KEY_TILE).to(dtype)
    order = torch.randperm(batch * blocks).tolist()
    slices = [(i, 1, length - 1, order[i * blocks : (i + 1) * blocks]) for i in range(batch)]
    qkv = torch.randn(batch, (n + 2 * k) * h).to(dtype)
    heads, target = C.AttentionHeads(n, k, h, h**-0.5), torch.empty_like(cache)
    sides = {"decode": lambda: C.attention_paged(qkv, slices, heads, cache), "copy": lambda: target.copy_(cache)}
    times = alternate(sides, 4 * report.args.repeats, warmup=1)
    moved = {"decode": 2 * batch * length * k * h * cache.element_size(), "copy": 2 * cache.nbytes}
    for side, time in times.items():
        what = f"{model} {str(dtype).removeprefix('torch.')} {batch}x1 over {length}"
        report.add(what, side, time, gb_per_s=moved[side] / time.median / 1e9)


def main() -> None:
    report = begin(__doc__, 7, model=choice("all", *MODELS))
    for model in MODELS if report.args.model == "all" else [report.args.model]:
        for dtype in (torch.float32, torch.bfloat16):
            for length, count in [(2048, 1), (512, 4), (128, 16)]:
                measure_packed(report, model, dtype, length, count)
            for batch, length in [(1, 100), (1, 2000), (16, 100), (64, 100), (64, 500)]:
                measure_decode(report, model, dtype, batch, length)
    report.finish()


if __name__ == "__main__":
    main()
