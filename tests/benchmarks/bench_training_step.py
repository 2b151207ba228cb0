"""A training step of 2,048 packed tokens (forward, loss, backward, clipping, AdamW), compared with transformers.

    uv run python tests/benchmarks/bench_training_step.py [--precision bfloat16 float32] [--lengths mixed] [--prompt 0]
        [--sides ...] [--rounds 3] [--shape smollm2|qwen3.5|olmoe|gemma3]

The model is SmolLM2-135M, or with `--shape` one with random weights (shapes.py). There are 16 samples of 128 tokens,
or with `--lengths mixed` of 45 to 290 tokens with the same sum. By default every token is trained, and the samples have
nothing in common. With `--prompt N` they are like GRPO's: groups of 8 share their first N tokens, and only later tokens
are trained. Ours then computes a prompt once per group; the peers compute only the logits of trained tokens, as TRL
does. Four sides fit into 24 GB of memory, fewer with mixed lengths in float32 or with olmoe.

Each side runs in a separate process, and the sides take turns after each step. The first step of a process is a
warm-up, in which all gradient norms must agree within 5 %. All peers use sdpa and fused AdamW. The sides:

  ours                       one micro-batch of 2,048 tokens
  ours_halved                two micro-batches of half the tokens: the same gradients, with half of the activations at
                             a time
  transformers               the usual way: fp32 weights, bf16 autocast (or plain fp32), full logits, one batch padded
                             to the longest sample
  transformers_packed        the same on one row without padding, with positions that restart at each sample
  transformers_tuned         logits of trained tokens in checkpointed chunks of 256, large blocks kept by glibc, huge
                             pages, matmul precision "medium"
  transformers_tuned_sorted  the same in four micro-batches of samples with similar lengths

Memory is the peak growth of a process after the imports, minus 18 bytes per parameter in bfloat16 and 16 in float32.
`of_peak` is 6 x parameters x tokens per second (of the tokens and parameters that ours computes), divided by the speed
of one product of 2,048 x 4,096 x 4,096, by torch or by us, whichever is faster, after each round. `tok_s` counts the
tokens of all samples on every side, without padding."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from functools import partial

import torch
from harness import load_decoder, memory_of, tune_malloc
from peer_steps import chunked_loss, full_loss, peer_step
from shapes import SHAPES, parameters, random_model
from sides import HIDDEN, Child, choice, choices, options
from training_samples import COUNT, GROUP, LENGTHS, TOKENS, Layout, Samples, packed, padded, sorted_by_length

HALF_SLACK = 32  # tokens: samples of mixed lengths cannot be split into two equal halves


def ours(folder: str, precision: str, halved: bool = False):
    return our_step(load_decoder(folder, precision, True)[0], TOKENS, halved)


def our_step(model, max_tokens: int, halved: bool = False):
    """Return a function that takes a step on samples and returns the gradient norm.

    Micro-batches have at most `max_tokens` tokens; with `halved`, the samples form two halves."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
    from nemo_rl_cpp.models.policy.micro_batches import MicroBatching
    from nemo_rl_cpp.models.policy.train_step import MicroBatchRunner

    trainer = C.Trainer(model)
    # with advantages and ratios of 1, the gradient is that of -mean(logprobs), which is the peer's loss
    loss_fn = ClippedPGLossFn({"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0})

    def run(samples: Samples) -> float:
        rows = len(samples.ids)
        batch = {"input_ids": samples.ids, "input_lengths": samples.lengths, "token_mask": samples.trained.float(),
                 "sample_mask": torch.ones(rows), "advantages": torch.ones(samples.ids.shape),
                 "generation_logprobs": torch.full(samples.ids.shape, -10.0)}  # fmt: skip
        if samples.prompt:
            batch["group_id"] = torch.arange(rows) // GROUP
        batching = MicroBatching(max_tokens=samples.computed // 2 + HALF_SLACK if halved else max_tokens)
        trainer.zero_grad()
        MicroBatchRunner(trainer, loss_fn, batching).forward_backward(RaggedBatch.of(batch), 0, rows, on_policy=True)
        return trainer.step(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0).grad_norm

    return run


def transformers(folder: str, precision: str, tuned: bool = False, layout: Layout = padded):
    from transformers import AutoModelForCausalLM

    if tuned:
        tune_malloc()
        torch.set_float32_matmul_precision("medium")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    return peer_step(model, precision, chunked_loss if tuned else full_loss, layout)


SIDES = {
    "ours": ours,
    "ours_halved": partial(ours, halved=True),
    "transformers": transformers,
    "transformers_packed": partial(transformers, layout=packed),
    "transformers_tuned": partial(transformers, tuned=True),
    "transformers_tuned_sorted": partial(transformers, tuned=True, layout=sorted_by_length),
}
PEERS = [name for name in SIDES if name.startswith("transformers")]


def one_side(arguments: argparse.Namespace) -> None:
    """Run in the child: take a step for every line of standard input, and print seconds, peak memory so far and
    gradient norm."""
    import nemo_rl_cpp._native  # noqa: F401
    import transformers as _  # noqa: F401

    torch.set_num_threads(arguments.threads)
    precision, lengths = arguments.precision[0], LENGTHS[arguments.lengths]()
    base = memory_of("VmRSS") + parameters(arguments.model)[0] * (18 if precision == "bfloat16" else 16)
    run = SIDES[arguments.side](arguments.model, precision)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        samples = Samples.random(lengths, arguments.prompt, int(line))
        start = time.perf_counter()
        norm = run(samples)
        print(json.dumps([time.perf_counter() - start, (memory_of("VmHWM") - base) / 1e6, norm]), flush=True)


def start(name: str, folder: str, precision: str, arguments: argparse.Namespace) -> Child:
    """Start the process of a side. It answers a seed with [seconds, peak memory in MB so far, gradient norm]."""
    command = [sys.executable, __file__, "--side", name, "--model", folder, "--precision", precision]
    command += [f"--{key}={getattr(arguments, key)}" for key in ("lengths", "threads", "prompt")]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1") if "tuned" in name else None
    return Child(name, command, environment)


def matrix_peak(precision: str) -> float:
    """Return the floating-point operations per second of one large product, by torch or by us, whichever is faster.

    The speed of float32 also counts for bfloat16."""
    from nemo_rl_cpp._native import C

    best = 0.0
    for dtype in {getattr(torch, precision), torch.float32}:
        a, b = (torch.randn(rows, 4096).to(dtype) for rows in (2048, 4096))
        out = torch.empty(2048, 4096, dtype=dtype)
        for product in (lambda: torch.mm(a, b.T, out=out), lambda: C.linear_forward(a, b, None, out)):  # noqa: B023 - called here
            product()
            start = time.perf_counter()
            product()
            best = max(best, 2 * a.shape[0] * b.numel() / (time.perf_counter() - start))
    return best


def figures(name: str, rows: dict[str, list[list[float]]], peaks: list[float], samples: Samples, folder: str) -> dict:
    """Return speed and memory of one side; for ours also relative to each peer, paired step by step."""
    steps = rows[name]
    row = {"tok_s": round(TOKENS / statistics.median(s for s, _, _ in steps)), "extra_mb": round(steps[-1][1])}
    if name in PEERS:
        return row
    _, layers, head = parameters(folder)
    flops = 6 * (samples.computed * layers + (TOKENS - COUNT * samples.prompt) * head)
    row["of_peak"] = round(statistics.median(flops / s / p for (s, _, _), p in zip(steps, peaks, strict=True)), 2)
    for peer in PEERS:
        if peer in rows:
            ratios = [theirs[0] / mine[0] for mine, theirs in zip(steps, rows[peer], strict=True)]
            row[f"against_{peer}"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
            row[f"memory_of_{peer}"] = round(steps[-1][1] / rows[peer][-1][1], 2)
    return row


def measure(precision: str, folder: str, arguments: argparse.Namespace) -> dict[str, dict]:
    sides = {name: start(name, folder, precision, arguments) for name in arguments.sides}
    norms = {name: side.ask(0)[2] for name, side in sides.items()}
    if max(norms.values()) > 1.05 * min(norms.values()):
        raise SystemExit(f"the sides do not compute the same step: norms of the first gradient {norms}")
    rows, peaks = {name: [] for name in sides}, []
    for round_ in range(1, arguments.rounds + 1):
        for name, side in sides.items():
            rows[name].append(side.ask(round_))
        peaks.append(matrix_peak(precision))
    for side in sides.values():
        side.close()
    samples = Samples.random(LENGTHS[arguments.lengths](), arguments.prompt, seed=0)
    return {name: figures(name, rows, peaks, samples, folder) for name in rows}


def main() -> None:
    arguments = options(
        __doc__, precision=["bfloat16", "float32"], lengths=choice(*LENGTHS), prompt=0, rounds=3, threads=2,
        shape=choice("smollm2", *SHAPES), side=HIDDEN, model=HIDDEN,
        sides=choices(SIDES, "ours", "ours_halved", "transformers", "transformers_tuned"),
    )  # fmt: skip
    shortest = min(LENGTHS[arguments.lengths]())
    if not 0 <= arguments.prompt < shortest:
        raise SystemExit(
            f"--prompt {arguments.prompt}: the shortest sample has {shortest} tokens, so 0 to {shortest - 1} can be shared"
        )
    if arguments.side:
        return one_side(arguments)
    torch.set_num_threads(arguments.threads)
    result = {}
    with random_model(arguments.shape) as folder:
        for precision in arguments.precision:
            result[precision] = measure(precision, folder, arguments)
            for name, row in result[precision].items():
                print(precision, name, row, flush=True)
    setting = {key: getattr(arguments, key) for key in ("shape", "lengths", "prompt", "threads")} | {
        "torch": torch.__version__
    }
    print(json.dumps({"machine": platform.processor() or platform.machine(), **setting, "rows": result}))


if __name__ == "__main__":
    main()
