"""A whole GRPO step (8 prompts x 8 generations, 64 new tokens, bf16), compared with TRL's GRPOTrainer: seconds, peak
memory.

    uv run python tests/benchmarks/bench_grpo_step.py [--steps 3] [--rounds 2] [--threads 2] [--our-batch 32]
        [--trl-batch 64]

The sides run in separate processes, in turn; TRL has a separate environment, which uv creates. The first step of a
process is a warm-up. Both sides get the same model folder, prompts, reward and learning rate, and neither stops before
64 tokens. `--our-batch` is policy.train_micro_batch_size, and `--trl-batch` is TRL's per_device_train_batch_size: the
number of samples that go through the model at a time. Below 64 this means gradient accumulation."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import HIDDEN, memory_of, options

PROMPTS, GENERATIONS, NEW = 8, 8, 64
TRL = ["trl==1.16.0", "transformers==5.23.0", "torch==2.15.0", "datasets", "accelerate"]


def prompt_texts(steps: int) -> list[str]:
    """Return different texts of about 30 tokens."""
    return [
        f"Question {i}: a farmer has {i + 3} cows and {2 * i + 5} hens, and sells {i % 7 + 1} hens. How many are left?\nAnswer:"
        for i in range(PROMPTS * steps)
    ]


def reward(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits, which is cheap to compute and differs within a group."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def ours(folder: str, steps: int, threads: int, batch: int) -> dict[str, object]:
    import torch

    torch.set_num_threads(threads)
    import nemo_rl_cpp

    with tempfile.TemporaryDirectory() as logs:
        result = nemo_rl_cpp.train_grpo(
            folder, prompt_texts(steps), reward, steps, num_prompts_per_step=PROMPTS, num_generations=GENERATIONS, max_new_tokens=NEW,
            learning_rate=1e-6, precision="bfloat16", log_dir=logs, policy__generation__stop_token_ids=[],
            policy__train_micro_batch_size=batch,
        )  # fmt: skip
    return {"seconds": [row["seconds"] for row in result.history], "torch": torch.__version__}


def trl(folder: str, steps: int, threads: int, batch: int) -> dict[str, object]:
    import torch

    torch.set_num_threads(threads)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, max_steps=steps, per_device_train_batch_size=batch, gradient_accumulation_steps=PROMPTS * GENERATIONS // batch,
            num_generations=GENERATIONS, max_completion_length=NEW, generation_kwargs={"min_new_tokens": NEW}, temperature=1.0, beta=0.0,
            learning_rate=1e-6, bf16=True, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, gradient_checkpointing=False,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": prompt_texts(steps)})
        GRPOTrainer(model=folder, reward_funcs=reward, args=config, train_dataset=data, callbacks=[clock]).train()
    return {"seconds": clock.seconds, "torch": torch.__version__}


def one_side(name: str, arguments: argparse.Namespace) -> None:
    """Run in the child, and print one line of JSON at the end."""
    side, batch = {"ours": (ours, arguments.our_batch), "trl": (trl, arguments.trl_batch)}[name]
    result = side(arguments.model, arguments.steps + 1, arguments.threads, batch)
    result["peak_rss_gb"] = memory_of("VmHWM") / 2**30
    print("\n" + json.dumps(result))


def run_side(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    script = [str(Path(__file__).resolve()), "--side", name, "--model", arguments.model]
    script += [f"--{key}={getattr(arguments, key)}" for key in ("steps", "threads", "our_batch", "trl_batch")]
    python = [sys.executable]
    if name == "trl":
        python = ["uv", "run", "--quiet", "--no-project", *(f"--with={package}" for package in TRL), "python"]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*python, *script], capture_output=True, text=True, env=environment, cwd=folder, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    arguments = options(__doc__, steps=3, rounds=2, threads=2, our_batch=32, trl_batch=64, model=HIDDEN, side=HIDDEN)
    if arguments.side:
        return one_side(arguments.side, arguments)
    from nemo_rl_cpp.hub.sources import resolve_model

    arguments.model = str(resolve_model("smollm2-135m-instruct"))
    runs: dict[str, list[dict[str, object]]] = {"ours": [], "trl": []}
    for _ in range(arguments.rounds):
        for name, done in runs.items():
            done.append(run_side(name, arguments))
            print(name, json.dumps(done[-1]), flush=True)
    seconds = {name: statistics.median(s for r in done for s in r["seconds"][1:]) for name, done in runs.items()}
    memory = {name: max(r["peak_rss_gb"] for r in done) for name, done in runs.items()}
    print(
        f"step: ours {seconds['ours']:.2f} s, TRL {seconds['trl']:.2f} s, {seconds['trl'] / seconds['ours']:.1f} times faster"
    )
    print(
        f"peak RSS: ours {memory['ours']:.2f} GB, TRL {memory['trl']:.2f} GB, ratio {memory['ours'] / memory['trl']:.2f}"
    )
    given = vars(arguments) | {"model": "smollm2-135m-instruct"}
    print(json.dumps({"machine": platform.processor() or platform.machine(), "arguments": given, "runs": runs}))


if __name__ == "__main__":
    main()
