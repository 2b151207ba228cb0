"""A training step of 2,048 packed tokens (forward, loss, backward, clipping, AdamW) against transformers + sdpa + fused AdamW.

    uv run python tests/benchmarks/bench_training_step.py [--precision bfloat16 float32] [--prompt 0] [--sides ...] [--rounds 3] [--threads 2]

16 samples of 128 tokens. By default every token is trained and no two samples have anything in common. With `--prompt N` they are what GRPO
trains on: groups of 8 share their first N tokens, and only the tokens after those are trained. Ours then computes a prompt once a group;
the peers ask for the logits of trained tokens only, as TRL does.

Each side runs in a process of its own, a step in turn; the first step of a process is a warm-up. Sides:
  ours                       one micro-batch of 2,048 tokens
  ours_halved                two micro-batches of 1,024 tokens: the same gradients from half of the activations at a time
  transformers               the usual way: fp32 weights, bf16 autocast (or plain fp32), full logits
  transformers_tuned         logits in checkpointed chunks of 256 tokens, glibc keeping large blocks, in huge pages, matmul precision "medium"
  transformers_bf16_weights  the same with weights and optimizer state in bfloat16 (fast, and no longer the same training)
  transformers_tuned_float32 transformers_tuned in float32, whatever the precision: the fastest where bf16 has no instructions
Memory is what a process grows by at its peak after the imports, less 18 bytes a parameter in bfloat16 and 16 in float32. `of_peak` is
6 x parameters x tokens a second (of the tokens and parameters that ours computes) against one product of 2,048 x 4,096 x 4,096 by torch or
by us, whichever is faster, after each round. `tok_s` counts the tokens of all samples, on every side.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from harness import tune_malloc

B, S, GROUP = 16, 128, 8
PARAMETERS, HEAD_PARAMETERS = 134_515_008, 49_152 * 576
CHUNK = 256


def ours(folder: str, precision: str, prompt: int = 0, max_tokens: int = B * S):
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.models.hf_config import native_config, read_config
    from nemo_rl_cpp.models.weights import load_weights

    model = C.DecoderModel(native_config(read_config(folder)), getattr(torch, precision), True)
    load_weights(model, folder)
    return our_step(model, max_tokens, prompt)


def our_step(model, max_tokens: int, prompt: int = 0):
    """A step in micro-batches of so many tokens. Rows are trained after `prompt` tokens, which each GROUP of them then shares."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
    from nemo_rl_cpp.models.policy.micro_batches import MicroBatching
    from nemo_rl_cpp.models.policy.train_step import Scoring, run_global_batch

    trainer = C.Trainer(model)
    # with advantages of 1 and a ratio of 1 the gradient is that of -mean(logprobs), the peer's loss; every token counts
    loss_fn = ClippedPGLossFn({"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0})

    def run(ids):
        rows, length = ids.shape
        batch = {"input_ids": ids, "input_lengths": torch.full((rows,), length), "token_mask": torch.ones(rows, length),
                 "sample_mask": torch.ones(rows), "advantages": torch.ones(rows, length),
                 "generation_logprobs": torch.full((rows, length), -10.0)}  # fmt: skip
        if prompt:
            batch["token_mask"][:, :prompt] = 0
            batch["group_id"] = torch.arange(rows) // GROUP
        trainer.zero_grad()
        run_global_batch(trainer, batch, loss_fn, 0, rows, MicroBatching(max_tokens=max_tokens), Scoring(), train=True, on_policy=True)
        trainer.step(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)

    return run


def chunked_loss(model, ids, prompt: int = 0):
    """-mean(logprobs) with the head's logits of 256 tokens at a time, computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    def chunk(hidden, targets):
        return torch.log_softmax(model.lm_head(hidden).float(), -1).gather(-1, targets[:, None]).sum()

    first = max(prompt, 1)
    hidden = model.model(ids).last_hidden_state[:, first - 1 : -1].flatten(0, 1)
    parts = zip(hidden.split(CHUNK), ids[:, first:].flatten().split(CHUNK), strict=True)
    return -sum(checkpoint(chunk, h, t, use_reentrant=False) for h, t in parts) / len(hidden)


def transformers(folder: str, precision: str, prompt: int, tuned: bool = False, weights: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    if tuned:
        tune_malloc()
        torch.set_float32_matmul_precision("medium")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    autocast = precision == "bfloat16" and weights == torch.float32

    def full_loss(ids):
        first = max(prompt, 1)
        logits = model(ids, logits_to_keep=ids.shape[1] - first + 1).logits
        return -torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, first:, None]).mean()

    def run(ids):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = chunked_loss(model, ids, prompt) if tuned else full_loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


SIDES = {
    "ours": ours,
    "ours_halved": lambda folder, precision, prompt: ours(folder, precision, prompt, computed_tokens(prompt) // 2),
    "transformers": transformers,
    "transformers_tuned": partial(transformers, tuned=True),
    "transformers_bf16_weights": partial(transformers, tuned=True, weights=torch.bfloat16),
    "transformers_tuned_float32": lambda folder, _, prompt: transformers(folder, "float32", prompt, tuned=True),
}
PEERS = [name for name in SIDES if name.startswith("transformers")]


def computed_tokens(prompt: int) -> int:
    """How many ours computes of B x S: a prompt once a group."""
    return B * (S - prompt) + B // GROUP * prompt


def random_samples(seed: int, prompt: int) -> torch.Tensor:
    ids = torch.randint(0, 49152, (B, S), generator=torch.Generator().manual_seed(seed))
    ids[:, :prompt] = ids[::GROUP, :prompt].repeat_interleave(GROUP, 0)
    return ids


def memory(key: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at the most (ru_maxrss would start at the parent's)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def one_side(side: str, folder: str, precision: str, threads: int, prompt: int) -> None:
    """In the child: a step for every line of standard input; answers with seconds and the memory so far."""
    import transformers as _  # noqa: F401

    import nemo_rl_cpp._native  # noqa: F401

    torch.set_num_threads(threads)
    base = memory("VmRSS") + PARAMETERS * (18 if precision == "bfloat16" else 16)
    run = SIDES[side](folder, precision, prompt)
    print("ready", flush=True)
    for line in sys.stdin:
        ids = random_samples(int(line), prompt)
        start = time.perf_counter()
        run(ids)
        print(json.dumps([time.perf_counter() - start, (memory("VmHWM") - base) / 1e6]), flush=True)


class Side:
    """A child process that takes one step at a time."""

    def __init__(self, name: str, folder: str, precision: str, threads: int, prompt: int) -> None:
        command = [sys.executable, __file__, "--side", name, "--model", folder, "--precision", precision]
        command += ["--threads", str(threads), "--prompt", str(prompt)]
        environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1") if "tuned" in name else None
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment)
        self.answer(name)

    def answer(self, what: str) -> str:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise SystemExit(f"{what} ended with status {status}:\n{self.errors.read()}")
        return line

    def step(self, seed: int) -> list[float]:
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return json.loads(self.answer("a step"))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


def matrix_peak(precision: str) -> float:
    """Floating-point operations a second of one large product, by torch or by us, whichever is faster; float32 counts for bfloat16 too."""
    from nemo_rl_cpp._native import C

    best = 0.0
    for dtype in {getattr(torch, precision), torch.float32}:
        a, b, out = torch.randn(2048, 4096).to(dtype), torch.randn(4096, 4096).to(dtype), torch.empty(2048, 4096, dtype=dtype)
        for product in (lambda: torch.mm(a, b.T, out=out), lambda: C.linear_forward(a, b, None, out)):  # noqa: B023 - called here
            product()
            start = time.perf_counter()
            product()
            best = max(best, 2 * a.shape[0] * b.numel() / (time.perf_counter() - start))
    return best


def figures(name: str, steps: list[list[float]], rows: dict[str, list[list[float]]], peaks: list[float], prompt: int) -> dict:
    """Of one side: speed and memory; for ours, against each peer, paired step by step."""
    row = {"tok_s": round(B * S / statistics.median(s for s, _ in steps)), "extra_mb": round(steps[-1][1])}
    if name in PEERS:
        return row
    flops = 6 * (computed_tokens(prompt) * (PARAMETERS - HEAD_PARAMETERS) + B * (S - prompt) * HEAD_PARAMETERS)
    row["of_peak"] = round(statistics.median(flops / s / p for (s, _), p in zip(steps, peaks, strict=True)), 2)
    for peer in PEERS:
        if peer in rows:
            ratios = [theirs[0] / mine[0] for mine, theirs in zip(steps, rows[peer], strict=True)]
            row[f"against_{peer}"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
            row[f"memory_of_{peer}"] = round(steps[-1][1] / rows[peer][-1][1], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=0, choices=range(S), metavar=f"0..{S - 1}")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours", "ours_halved", "transformers", "transformers_tuned"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return one_side(arguments.side, arguments.model, arguments.precision[0], arguments.threads, arguments.prompt)
    torch.set_num_threads(arguments.threads)
    from nemo_rl_cpp.models.sources import resolve_model

    folder, result = str(resolve_model("smollm2-135m-instruct")), {}
    for precision in arguments.precision:
        sides = {name: Side(name, folder, precision, arguments.threads, arguments.prompt) for name in arguments.sides}
        rows, peaks = {name: [] for name in sides}, []
        for round_ in range(arguments.rounds + 1):
            for name, side in sides.items():
                step = side.step(round_)
                rows[name] += [step] if round_ else []
            peaks += [matrix_peak(precision)] if round_ else []
        for side in sides.values():
            side.close()
        result[precision] = {name: figures(name, steps, rows, peaks, arguments.prompt) for name, steps in rows.items()}
        for name, row in result[precision].items():
            print(precision, name, row, flush=True)
    setting = {"prompt": arguments.prompt, "threads": arguments.threads, "torch": torch.__version__}
    print(json.dumps({"machine": platform.processor() or platform.machine(), **setting, "rows": result}))


if __name__ == "__main__":
    main()
