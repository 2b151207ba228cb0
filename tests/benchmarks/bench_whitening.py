"""Masked whitening in place, [256, 2048] and a size that fits in no cache, compared with torch eager and torch.compile.

    uv run python tests/benchmarks/bench_whitening.py [--threads 1] [--repeats 15] [--device cuda] [--json out.json]

The limit is the memory traffic (values and mask read twice, values written) at the copy bandwidth of this run.
"""

import torch
from harness import alternate, begin, copy_bandwidth, tune_malloc
from nemo_rl_cpp._native import C


def peer(values, mask):
    count = mask.sum()
    mean = (values * mask).sum() / count
    centred = (values - mean) * mask
    variance = (centred * centred).sum() / (count - 1)
    return centred * torch.rsqrt(variance + 1e-8)


def main():
    report = begin(__doc__)
    for B, S in ((256, 2048), (2048, 16384)):
        values = torch.randn(B, S, device=report.args.device)
        mask = (torch.rand_like(values) < 0.8).float()
        mine = values.clone()
        C.whiten_(mine, mask)
        torch.testing.assert_close(mine, peer(values, mask), rtol=1e-4, atol=1e-4)
        untuned = alternate({"eager": lambda: peer(values, mask)}, report.args.repeats)["eager"]
        tune_malloc()
        compiled = torch.compile(peer)
        sides = {
            "torch eager, malloc tuned": lambda: peer(values, mask),
            "torch.compile": lambda: compiled(values, mask),
        }
        times = alternate(sides | {"ours": lambda: C.whiten_(mine, mask)}, report.args.repeats)
        limit = 5 * values.nbytes / copy_bandwidth(report.args.device)
        report.compare(f"whitening [{B}, {S}]", {"torch eager": untuned} | times, limit=limit)
    report.finish()


if __name__ == "__main__":
    main()
