"""One AdamW step on a flat buffer, compared with torch.optim.AdamW (fused and for-each) and with memory bandwidth.

    uv run python tests/benchmarks/bench_adamw.py [--threads 1] [--parameters 33554432] [--device cuda] [--json out.json]

The limit is the memory traffic at the copy bandwidth of this run: weights, gradient and two moments are read, and all
of these except the gradient are written. A bfloat16 copy of the weights adds two bytes per weight."""

import torch
from harness import alternate, begin, copy_bandwidth
from nemo_rl_cpp._native import C

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def main():
    report = begin(__doc__, 9, parameters=1 << 25)
    n, on = report.args.parameters, {"device": report.args.device}
    weights, grads = torch.randn(n, **on), torch.randn(n, **on)
    exp_avg, exp_avg_sq = torch.zeros(n, **on), torch.zeros(n, **on)
    compute = torch.zeros(n, dtype=torch.bfloat16, **on)
    sides = {}
    for name, option in (("torch.optim.AdamW, for-each", "foreach"), ("torch.optim.AdamW, fused", "fused")):
        parameter = torch.nn.Parameter(weights.clone())
        parameter.grad = grads
        sides[name] = torch.optim.AdamW([parameter], **SETTINGS, **{option: True}).step
    count = iter(range(1, 1 << 30))

    def ours(copy):
        settings = dict(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
        C.adamw_step(weights, grads, exp_avg, exp_avg_sq, copy, **settings, step=next(count))

    sides |= {"ours": lambda: ours(None), "ours, with a bfloat16 copy": lambda: ours(compute)}
    times = alternate(sides, report.args.repeats)
    bandwidth = copy_bandwidth(report.args.device)
    for name, time in times.items():
        limit = (28 + 2 * name.endswith("copy")) * n / bandwidth
        what, ratio = f"AdamW, {n / 1e6:.1f} M parameters", time.median / times["ours"].median
        report.add(what, name, time, of_limit=limit / time.median, ratio=ratio)
    report.finish()


if __name__ == "__main__":
    main()
