"""Packing 100,000 sequence lengths into bins, compared with first-fit decreasing in plain Python.

    uv run python tests/benchmarks/bench_packing.py [--count 100000] [--python] [--json out.json]

`fill` is the share of the bins' capacity that tokens use; `of_bound` is the number of bins divided by ceil(sum /
capacity).
"""

import math

import torch
from harness import Report, Times, alternate, begin
from nemo_rl_cpp.config.policy import PACKERS

CAPACITY = 8192
ALGORITHMS = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")


def lengths_of(kind: str, count: int) -> list[int]:
    random = torch.Generator().manual_seed(0)
    if kind == "log-normal":
        raw = torch.exp(torch.randn(count, generator=random) * 0.8 + 6)
    else:
        raw = 16 / torch.rand(count, generator=random).clamp(min=1e-4)  # a Zipf-like tail
    return raw.clamp(1, CAPACITY).long().tolist()


def python_first_fit_decreasing(lengths: list[int]) -> list[list[int]]:
    bins, room = [], []
    for length, index in sorted(((length, i) for i, length in enumerate(lengths)), reverse=True):
        for b, free in enumerate(room):
            if free >= length:
                bins[b].append(index)
                room[b] -= length
                break
        else:
            bins.append([index])
            room.append(CAPACITY - length)
    return bins


def measure(report: Report, kind: str, lengths: list[int]) -> None:
    bound = math.ceil(sum(lengths) / CAPACITY)
    what = f"{len(lengths)} lengths, {kind}"

    def add(side: str, times: Times, bins: list[list[int]]) -> None:
        report.add(what, side, times, fill=sum(lengths) / (len(bins) * CAPACITY), of_bound=len(bins) / bound)

    for name in ALGORITHMS:
        pack = PACKERS[name]
        times = alternate({"pack": lambda: pack(lengths, CAPACITY)}, report.args.repeats, warmup=1)["pack"]
        add(name, times, pack(lengths, CAPACITY))
    if report.args.python:
        times = alternate({"pack": lambda: python_first_fit_decreasing(lengths)}, 1, warmup=0)["pack"]
        add("plain Python first fit", times, python_first_fit_decreasing(lengths))


def main():
    report = begin(__doc__, 7, count=100_000, python={"action": "store_true", "help": "the plain Python packer too"})
    for kind in ("log-normal", "Zipf"):
        measure(report, kind, lengths_of(kind, report.args.count))
    report.finish()


if __name__ == "__main__":
    main()
