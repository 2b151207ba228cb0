"""Time per token of a training step as the batch grows (1x to 16x) and as samples get longer (128 to 2,048 tokens).

    uv run python tests/benchmarks/bench_time_per_token.py [--precision bfloat16] [--base 512] [--repeats 3] [--threads 2]

A step is forward, loss, backward and AdamW of SmolLM2-135M on packed random tokens in micro-batches of 2,048 tokens at most. `step` is
one optimizer update however large the batch is, so `of_1x` may fall below 1. Attention grows with the length of a sample: its forward
and backward over the same sequences are measured alone, and `without_attention` compares what is left. Sides take turns in one run.
"""

import sys

import torch
from harness import Report, Times, alternate, begin

from nemo_rl_cpp._native import C

MICRO_BATCH_TOKENS = 2048
LENGTHS = (128, 512, 2048)
SCALES = (1, 2, 4, 8, 16)


class Step:
    """One training step of `samples` x `length` random tokens."""

    def __init__(self, folder: str, precision: str) -> None:
        from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
        from nemo_rl_cpp.models.hf_config import native_config, read_config
        from nemo_rl_cpp.models.weights import load_weights

        self.config = native_config(read_config(folder))
        model = C.DecoderModel(self.config, getattr(torch, precision), True)
        load_weights(model, folder)
        self.trainer = C.Trainer(model)
        self.dtype = getattr(torch, precision)
        self.loss_fn = ClippedPGLossFn({"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0})

    def of(self, samples: int, length: int):
        from nemo_rl_cpp.models.policy.train_step import MicroBatching, Scoring, run_global_batch

        ids = torch.randint(0, 49152, (samples, length), generator=torch.Generator().manual_seed(samples))
        batch = {"input_ids": ids, "input_lengths": torch.full((samples,), length), "token_mask": torch.ones(samples, length),
                 "sample_mask": torch.ones(samples), "advantages": torch.ones(samples, length),
                 "generation_logprobs": torch.full((samples, length), -10.0)}  # fmt: skip

        def run() -> None:
            self.trainer.zero_grad()
            run_global_batch(self.trainer, batch, self.loss_fn, 0, samples, MicroBatching(max_tokens=MICRO_BATCH_TOKENS), Scoring(),
                             train=True, on_policy=True)  # fmt: skip
            self.trainer.step(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)

        return run

    def attention(self, samples: int, length: int):
        """Attention alone, all layers, forward and backward."""
        c = self.config
        n, k, h = c["num_heads"], c["num_kv_heads"], c["head_dim"]
        heads = C.AttentionHeads(n, k, h, h**-0.5)
        qkv, d_out = torch.randn(samples * length, (n + 2 * k) * h).to(self.dtype), torch.randn(samples * length, n * h).to(self.dtype)
        sequences = [(i * length, length, 0, 0) for i in range(samples)]

        def run() -> None:
            for _ in range(c["num_layers"]):
                out, lse = C.attention_forward(qkv, sequences, heads)
                C.attention_backward(qkv, out, d_out, lse, sequences, heads)

        return run


def add(report: Report, what: str, side: str, tokens: int, times: Times, **figures: float) -> float:
    per_token = times.median / tokens
    report.add(what, side, times, us_a_token=per_token * 1e6, **figures)
    return per_token


def main() -> None:
    report = begin(__doc__, 3, precision={"default": "bfloat16", "choices": ["bfloat16", "float32"]}, base={"type": int, "default": 512},
                   lengths_only={"action": "store_true"})  # fmt: skip
    from nemo_rl_cpp.models.sources import resolve_model

    step = Step(str(resolve_model("smollm2-135m-instruct")), report.args.precision)
    base = report.args.base
    if not report.args.lengths_only:
        sides = {str(scale): step.of(base * scale // 64, 64) for scale in SCALES}
        first = 0.0
        for scale, times in zip(SCALES, alternate(sides, report.args.repeats, warmup=1).values(), strict=True):
            per_token = times.median / (base * scale)
            first = first or per_token
            add(report, f"{base * scale} tokens, samples of 64", f"{scale}x", base * scale, times, of_1x=per_token / first)
    tokens = 2 * MICRO_BATCH_TOKENS
    sides = {f"{kind} {length}": make(tokens // length, length) for length in LENGTHS for kind, make in (("step", step.of), ("attention", step.attention))}
    measured = alternate(sides, report.args.repeats, warmup=1)
    rest = {length: measured[f"step {length}"].median - measured[f"attention {length}"].median for length in LENGTHS}
    for length in LENGTHS:
        what = f"{tokens} tokens, samples of {length}"
        add(report, what, "attention alone", tokens, measured[f"attention {length}"])
        add(report, what, "step", tokens, measured[f"step {length}"], without_attention=rest[length] / rest[LENGTHS[0]])
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
