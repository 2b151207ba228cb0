"""Time per token of a training step as the batch grows (1x to 16x) and as samples get longer (128 to 2,048 tokens).

    uv run python tests/benchmarks/bench_time_per_token.py [--precision bfloat16] [--base 512] [--repeats 3] [--threads 2]

A step is forward, loss, backward and AdamW of SmolLM2-135M on packed random tokens, in micro-batches of at most 2,048
tokens. A step has one optimizer update, whatever the batch size, so `of_1x` may be below 1. The cost of attention grows
with the length of a sample, so its forward and backward on the same sequences are also measured alone, and
`without_attention` compares the remaining time. The cases are measured in turn in one run.
"""

import sys

import torch
from bench_training_step import our_step
from harness import Report, Times, alternate, begin, load_decoder, smollm2
from nemo_rl_cpp._native import C
from sides import choice
from training_samples import Samples

MICRO_BATCH_TOKENS = 2048
LENGTHS = (128, 512, 2048)
SCALES = (1, 2, 4, 8, 16)


def step_of(run, samples: int, length: int):
    """Return a function that runs one training step on `samples` x `length` random tokens."""
    ids = torch.randint(0, 49152, (samples, length), generator=torch.Generator().manual_seed(samples))
    return lambda: run(Samples.whole(ids))


def attention_of(config: dict, dtype: torch.dtype, samples: int, length: int):
    """Return a function that runs forward and backward of attention alone, for all layers."""
    n, k, h = config["num_heads"], config["num_kv_heads"], config["head_dim"]
    heads = C.AttentionHeads(n, k, h, h**-0.5)
    qkv, d_out = (torch.randn(samples * length, width * h).to(dtype) for width in (n + 2 * k, n))
    sequences = [(i * length, length, 0, 0) for i in range(samples)]

    def run() -> None:
        for _ in range(len(config["layers"])):
            out, lse = C.attention_forward(qkv, sequences, heads)
            C.attention_backward(qkv, out, d_out, lse, sequences, heads)

    return run


def add(report: Report, what: str, side: str, tokens: int, times: Times, **figures: float) -> None:
    report.add(what, side, times, us_a_token=times.median / tokens * 1e6, **figures)


def main() -> None:
    report = begin(__doc__, 3, precision=choice("bfloat16", "float32"), base=512, lengths_only=False)
    model, config = load_decoder(smollm2(), report.args.precision, True)
    run, dtype, base = our_step(model, MICRO_BATCH_TOKENS), getattr(torch, report.args.precision), report.args.base
    if not report.args.lengths_only:
        sides = {str(scale): step_of(run, base * scale // 64, 64) for scale in SCALES}
        first = 0.0
        for scale, times in zip(SCALES, alternate(sides, report.args.repeats, warmup=1).values(), strict=True):
            tokens = base * scale
            first = first or times.median / tokens
            what = f"{tokens} tokens, samples of 64"
            add(report, what, f"{scale}x", tokens, times, of_1x=times.median / tokens / first)
    tokens = 2 * MICRO_BATCH_TOKENS
    sides = {f"step {length}": step_of(run, tokens // length, length) for length in LENGTHS}
    sides |= {f"attention {length}": attention_of(config, dtype, tokens // length, length) for length in LENGTHS}
    measured = alternate(sides, report.args.repeats, warmup=1)
    rest = {length: measured[f"step {length}"].median - measured[f"attention {length}"].median for length in LENGTHS}
    for length in LENGTHS:
        what = f"{tokens} tokens, samples of {length}"
        add(report, what, "attention alone", tokens, measured[f"attention {length}"])
        add(report, what, "step", tokens, measured[f"step {length}"], without_attention=rest[length] / rest[LENGTHS[0]])
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
