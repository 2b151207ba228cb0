"""A training step of 2,048 packed tokens (forward, loss, backward, clipping, AdamW), of all weights or with LoRA, compared
with peers.

    uv run python tests/benchmarks/bench_training_step.py [--precision bfloat16 float32] [--lengths mixed] [--prompt 0]
        [--sides ...] [--rounds 3] [--shape smollm2|qwen3.5|olmoe|gemma3|gemma4|llama3] [--dim 8]

The model is SmolLM2-135M, or with `--shape` one with random weights (shapes.py). There are 16 samples of 128 tokens,
or with `--lengths mixed` of 45 to 290 tokens with the same sum. By default every token is trained, and the samples have
nothing in common. With `--prompt N` they are like GRPO's: groups of 8 share their first N tokens, and only later tokens
are trained. Ours then computes a prompt once per group; the peers compute only the logits of trained tokens, as TRL
does. Four sides fit into 24 GB of memory, fewer with mixed lengths in float32 or with olmoe.

Each side runs in a separate process, and the sides take turns after each step. The first step of a process is a
warm-up, in which the gradient norms of all sides that train all weights must agree within 5 %. All peers use sdpa and
fused AdamW. The sides that train all weights:

  ours                       one micro-batch of 2,048 tokens
  ours_halved                two micro-batches of half the tokens: the same gradients, with half of the activations at
                             a time
  transformers               the usual way: fp32 weights, bf16 autocast (or plain fp32), full logits, one batch padded
                             to the longest sample
  transformers_packed        the same on one row without padding, with positions that restart at each sample
  transformers_tuned         logits of trained tokens in checkpointed chunks of 256, large blocks kept by glibc, huge
                             pages, matmul precision "medium"
  transformers_tuned_sorted  the same in four micro-batches of samples with similar lengths

The sides with LoRA of rank `--dim` on all matrices:

  lora                       ours, with the merge of all adapters
  apart                      ours with lora_cfg.merge false; `q8_0`, `q4_0` and `nf4`: the same over a quantised base
  peft                       transformers with a PEFT adapter over a base in the precision, as TRL trains it
  unsloth                    Unsloth's CPU back end over bitsandbytes' nf4, without recomputation, in an environment
                             that uv creates

`thread_s` is the time of the process's threads, which a busy machine affects less than `tok_s`. `growth_mb` is the peak
growth of a process after the imports; `extra_mb` is the growth minus 18 bytes per parameter in bfloat16 and 16 in
float32. `of_peak` is 6 x parameters x tokens per second (of the tokens and parameters that ours computes), divided by
the speed of one product of 2,048 x 4,096 x 4,096, by torch or by us, whichever is faster, after each round. `tok_s`
counts the tokens of all samples on every side, without padding. Times and growth are also given relative to those of the
first side, paired step by step: median, minimum and maximum."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from peer_steps import chunked_loss, full_loss, peer_step
from sides import HIDDEN, Child, choice, choices, memory_of, options
from training_samples import COUNT, GROUP, LENGTHS, TOKENS, Layout, Samples, packed, padded, sorted_by_length

UNSLOTH = ["unsloth==2026.10.9", "torch==2.14.1"]
HALF_SLACK = 32  # tokens: samples of mixed lengths cannot be split into two equal halves


def ours(
    folder: str, arguments: argparse.Namespace, halved: bool = False, lora: str = "", quantization: str | None = None
):
    from harness import load_decoder, tune_malloc
    from nemo_rl_cpp.config.lora import LayerKinds

    model, native = load_decoder(folder, arguments.precision[0], not lora, quantization)
    if lora:
        tune_malloc()
        targets = [f"{m}.weight" for m in LayerKinds(len(native["layers"])).modules()]
        model.adapt(arguments.dim, 4.0 * arguments.dim, targets, merge=lora == "merged")
        model.masters.copy_(torch.randn(model.masters.shape, generator=torch.Generator().manual_seed(0)) * 0.01)
        model.masters_changed()
    return our_step(model, TOKENS, halved)


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


def transformers(folder: str, arguments: argparse.Namespace, tuned: bool = False, layout: Layout = padded):
    from harness import tune_malloc
    from transformers import AutoModelForCausalLM

    if tuned:
        tune_malloc()
        torch.set_float32_matmul_precision("medium")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    return peer_step(model, arguments.precision[0], chunked_loss if tuned else full_loss, layout)


def peft(folder: str, arguments: argparse.Namespace):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    (precision,) = arguments.precision
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, attn_implementation="sdpa")
    config = LoraConfig(r=arguments.dim, lora_alpha=4 * arguments.dim, target_modules="all-linear")
    return peer_step(get_peft_model(base, config).train(), precision)


def unsloth(folder: str, arguments: argparse.Namespace):
    from unsloth import FastLanguageModel

    base, _ = FastLanguageModel.from_pretrained(folder, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        base, r=arguments.dim, lora_alpha=4 * arguments.dim, use_gradient_checkpointing=False
    )

    def loss(model, batch):
        labels = batch.input_ids.masked_fill(~batch.trained, -100)
        return model(batch.input_ids, labels=labels, **batch.options).loss * batch.trained.sum()

    return peer_step(model.train(), arguments.precision[0], loss)


WHOLE = {
    "ours": ours,
    "ours_halved": partial(ours, halved=True),
    "transformers": transformers,
    "transformers_packed": partial(transformers, layout=packed),
    "transformers_tuned": partial(transformers, tuned=True),
    "transformers_tuned_sorted": partial(transformers, tuned=True, layout=sorted_by_length),
}
"""The sides that train all weights."""
SIDES = WHOLE | {
    "lora": partial(ours, lora="merged"),
    "apart": partial(ours, lora="apart"),
    **{name: partial(ours, lora="apart", quantization=name) for name in ("q8_0", "q4_0", "nf4")},
    "peft": peft,
    "unsloth": unsloth,
}


def one_side(arguments: argparse.Namespace) -> None:
    """Run in the child: take a step for every line of standard input, and print seconds, thread seconds, peak growth so
    far in MB and gradient norm."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a peer prints is not an answer
    if arguments.side != "unsloth":
        import nemo_rl_cpp._native  # noqa: F401
        import transformers as _  # noqa: F401

    torch.set_num_threads(arguments.threads)
    lengths, before = LENGTHS[arguments.lengths](), memory_of("VmRSS")
    run = SIDES[arguments.side](arguments.model, arguments)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        samples = Samples.random(lengths, arguments.prompt, int(line))
        start, threads = time.perf_counter(), time.process_time()
        norm = run(samples)
        took = time.perf_counter() - start, time.process_time() - threads
        print(json.dumps([*took, (memory_of("VmHWM") - before) / 1e6, norm]), file=answers, flush=True)


def start(name: str, model: str, precision: str, arguments: argparse.Namespace, folder: str) -> Child:
    """Start the process of a side, in the working directory `folder`. It answers a seed with what `one_side` prints."""
    python = [sys.executable]
    if name == "unsloth":
        python = ["uv", "run", "--quiet", "--no-project", *(f"--with={package}" for package in UNSLOTH), "python"]
    command = [*python, str(Path(__file__).resolve()), "--side", name, "--model", model, "--precision", precision]
    command += [f"--{key}={getattr(arguments, key)}" for key in ("lengths", "threads", "prompt", "dim")]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1") if "tuned" in name else None
    return Child(name, command, environment, Path(folder))


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


def figures(
    rows: dict[str, list[list[float]]], peaks: list[float], samples: Samples, folder: str, precision: str
) -> dict:
    """Return speed and memory of each side, and their ratios to the first side, paired step by step."""
    from shapes import parameters

    count, layers, head = parameters(folder)
    flops = 6 * (samples.computed * layers + (TOKENS - COUNT * samples.prompt) * head)
    first, result = next(iter(rows.values())), {}
    for name, steps in rows.items():
        seconds, threads, growth, _ = zip(*steps, strict=True)
        row = {"tok_s": round(TOKENS / statistics.median(seconds)), "thread_s": round(statistics.median(threads), 3)}
        row["growth_mb"] = round(growth[-1])
        if name in WHOLE:
            row["extra_mb"] = round(growth[-1] - count * (18 if precision == "bfloat16" else 16) / 1e6)
        if name in ("ours", "ours_halved"):
            row["of_peak"] = round(statistics.median(flops / s / p for s, p in zip(seconds, peaks, strict=True)), 2)
        for column, what in enumerate(("time", "thread_time", "growth") if result else ()):
            ratios = [own[column] / theirs[column] for own, theirs in zip(steps, first, strict=True)]
            row[f"relative_{what}"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        result[name] = row
    return result


def measure(precision: str, model: str, arguments: argparse.Namespace) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: start(name, model, precision, arguments, folder) for name in arguments.sides}
        norms = {name: norm for name, side in sides.items() if (norm := side.ask(0)[3]) and name in WHOLE}
        if norms and max(norms.values()) > 1.05 * min(norms.values()):
            raise SystemExit(f"the sides do not compute the same step: norms of the first gradient {norms}")
        rows, peaks = {name: [] for name in sides}, []
        for round_ in range(1, arguments.rounds + 1):
            for name, side in sides.items():
                rows[name].append(side.ask(round_))
            peaks.append(matrix_peak(precision))
        for side in sides.values():
            side.close()
    samples = Samples.random(LENGTHS[arguments.lengths](), arguments.prompt, seed=0)
    return figures(rows, peaks, samples, model, precision)


def main() -> None:
    arguments = options(
        __doc__, precision=["bfloat16", "float32"], lengths=choice(*LENGTHS), prompt=0, rounds=3, threads=2, dim=8,
        shape=choice("smollm2", "qwen3.5", "olmoe", "gemma3", "gemma4", "llama3"), side=HIDDEN, model=HIDDEN,
        sides=choices(SIDES, "ours", "ours_halved", "transformers", "transformers_tuned"),
    )  # fmt: skip
    shortest = min(LENGTHS[arguments.lengths]())
    if not 0 <= arguments.prompt < shortest:
        raise SystemExit(
            f"--prompt {arguments.prompt}: the shortest sample has {shortest} tokens, so 0 to {shortest - 1} can be shared"
        )
    if arguments.side:
        return one_side(arguments)
    from shapes import random_model

    torch.set_num_threads(arguments.threads)
    result = {}
    with random_model(arguments.shape) as model:
        for precision in arguments.precision:
            result[precision] = measure(precision, model, arguments)
            for name, row in result[precision].items():
                print(precision, name, row, flush=True)
    setting = {key: getattr(arguments, key) for key in ("shape", "lengths", "prompt", "threads", "dim")}
    setting["torch"] = torch.__version__
    print(json.dumps({"machine": platform.processor() or platform.machine(), **setting, "rows": result}))


if __name__ == "__main__":
    main()
