"""The matrix products of a training step (forward, input and weight gradients), compared with torch's (MKL, oneDNN).

    uv run python tests/benchmarks/bench_linear.py [--threads 1] [--rows 2048] [--precision bfloat16] [--repeats 31]
        [--json out.json]

The shapes are those of SmolLM2-135M (qkv, gate and up, down) and Qwen2.5-0.5B (gate and up, down). `gflops` is 2 M N K
divided by the median time; `ratio` is a side's median time divided by ours. Ours accumulates in float32 in both
precisions. Its forward product gives a row bit-identical results, whatever other rows it is computed with."""

import torch
from harness import alternate, begin
from nemo_rl_cpp._native import C
from sides import choice

SHAPES = {
    "SmolLM2 qkv": (960, 576), "SmolLM2 gate, up": (3072, 576), "SmolLM2 down": (576, 1536),
    "Qwen 0.5B gate, up": (9728, 896), "Qwen 0.5B down": (896, 4864),
}  # fmt: skip


def products(M: int, N: int, K: int, dtype: torch.dtype) -> dict:
    """Return {product: (our function, torch's function)}."""
    x, w, y, dy = (torch.randn(*shape).to(dtype) for shape in ((M, K), (N, K), (M, N), (M, N)))
    dx, dw, their_dw = torch.empty(M, K, dtype=dtype), torch.zeros(N, K), torch.zeros(N, K, dtype=dtype)
    return {
        "forward": (lambda: C.linear_forward(x, w, None, y, False), lambda: torch.mm(x, w.T, out=y)),
        "input gradient": (lambda: C.linear_backward_input(dy, w, dx, False), lambda: torch.mm(dy, w, out=dx)),
        "weight gradient": (lambda: C.linear_backward_weight(dy, x, dw), lambda: their_dw.addmm_(dy.T, x)),
    }


def main():
    report = begin(__doc__, 31, rows=2048, precision=choice("float32", "bfloat16"))
    M, dtype = report.args.rows, getattr(torch, report.args.precision)
    torch.manual_seed(0)
    for shape, (N, K) in SHAPES.items():
        for name, (ours, theirs) in products(M, N, K, dtype).items():
            times = alternate({"ours": ours, "torch": theirs}, report.args.repeats)
            for side, time in times.items():
                gflops, ratio = 2 * M * N * K / time.median / 1e9, time.median / times["ours"].median
                report.add(f"{shape}: {name}", side, time, gflops=gflops, ratio=ratio)
    report.finish()


if __name__ == "__main__":
    main()
