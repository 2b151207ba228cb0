"""A training step of 2,048 packed tokens against transformers + sdpa + AdamW, paired in one run; peak memory of each side alone.
`ours_halved` takes two micro-batches of 1,024 tokens instead of one of 2,048.

    uv run python tests/benchmarks/bench_training_step.py [--precision bfloat16 float32] [--rounds 3] [--threads 2]
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

B, S = 16, 128


def ours(folder: str, precision: str, max_tokens: int = B * S):
    """A step of rows that are trained whole, in micro-batches of so many tokens."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
    from nemo_rl_cpp.models.hf_config import native_config, read_config
    from nemo_rl_cpp.models.policy.train_step import MicroBatching, Scoring, run_global_batch
    from nemo_rl_cpp.models.weights import load_weights

    model = C.DecoderModel(native_config(read_config(folder)), getattr(torch, precision), True)
    load_weights(model, folder)
    trainer = C.Trainer(model)
    # with advantages of 1 and a ratio of 1 the gradient is that of -mean(logprobs), the peer's loss; every token counts
    loss_fn = ClippedPGLossFn({"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0})

    def run(ids):
        rows, length = ids.shape
        batch = {"input_ids": ids, "input_lengths": torch.full((rows,), length), "token_mask": torch.ones(rows, length),
                 "sample_mask": torch.ones(rows), "advantages": torch.ones(rows, length),
                 "generation_logprobs": torch.full((rows, length), -10.0)}  # fmt: skip
        trainer.zero_grad()
        run_global_batch(trainer, batch, loss_fn, 0, rows, MicroBatching(max_tokens=max_tokens), Scoring(), train=True, on_policy=True)
        trainer.step(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)

    return run


def transformers(folder: str, precision: str):
    """The usual way: fp32 weights, bf16 autocast (or plain fp32), full logits, torch's fused AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def run(ids):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(ids).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def ours_halved(folder: str, precision: str):
    """The same step in two micro-batches: the same gradients from half of the activations at a time."""
    return ours(folder, precision, B * S // 2)


SIDES = {"ours": ours, "ours_halved": ours_halved, "transformers": transformers}


def memory(key: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at the most (ru_maxrss would start at the parent's)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def memory_of(side: str, folder: str, precision: str) -> float:
    """(peak RSS - RSS after import - optimizer and weights) in MB, measured in a process of its own."""
    code = f"import bench_training_step as b; b.print_memory({side!r}, {folder!r}, {precision!r})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=__file__.rsplit("/", 1)[0])
    return float(out.stdout.split()[-1])


def print_memory(side: str, folder: str, precision: str) -> None:
    import transformers as _  # noqa: F401

    import nemo_rl_cpp._native  # noqa: F401

    torch.set_num_threads(2)
    base = memory("VmRSS")
    run = SIDES[side](folder, precision)
    for step in range(2):
        run(torch.randint(0, 49152, (B, S), generator=torch.Generator().manual_seed(step)))
    parameters = 134_515_008
    print((memory("VmHWM") - base - parameters * (18 if precision == "bfloat16" else 16)) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from nemo_rl_cpp.models.sources import resolve_model

    folder, rows = str(resolve_model("smollm2-135m-instruct")), []
    for precision in arguments.precision:
        sides = {name: make(folder, precision) for name, make in SIDES.items()}
        times = {name: [] for name in sides}
        for round_ in range(arguments.rounds + 1):
            ids = torch.randint(0, 49152, (B, S), generator=torch.Generator().manual_seed(round_))
            for name, run in sides.items():
                start = time.perf_counter()
                run(ids)
                if round_:
                    times[name].append(time.perf_counter() - start)
        del sides
        memory = {name: memory_of(name, folder, precision) for name in SIDES}
        row = {"precision": precision}
        for name in SIDES:
            row |= {f"{name}_tok_s": round(B * S / statistics.median(times[name])), f"{name}_extra_mb": round(memory[name])}
        for name in ("ours", "ours_halved"):
            ratios = [b / a for a, b in zip(times[name], times["transformers"], strict=True)]
            row |= {f"{name}_ratio": [round(f(ratios), 2) for f in (statistics.median, min, max)],
                    f"{name}_memory_ratio": round(memory[name] / memory["transformers"], 2)}  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "threads": arguments.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
