"""Time and peak memory of a training step with LoRA, merged and separate, compared with a step of all weights and with
peers.

    uv run python tests/benchmarks/bench_lora.py [--precision bfloat16] [--dim 8] [--rounds 5] [--lengths mixed]
        [--prompt 0] [--sides lora apart q4_0 nf4 peft unsloth]

SmolLM2-135M is trained on the samples of bench_training_step.py, 2,048 tokens: forward, loss, backward, clipping,
AdamW, and with `lora` the merge of all adapters (`apart`: lora_cfg.merge false; `q8_0`, `q4_0` and `nf4`: over a
quantised base). Peers: `peft` is transformers with a PEFT adapter over a base in `--precision`, as TRL trains it;
`unsloth` is Unsloth's CPU back end over bitsandbytes' nf4, without recomputation, in an environment that uv creates.
Times and memory are also given relative to the first side.

Each side runs in a separate process. The sides take turns after each step, and the first step is a warm-up. Wall-clock
time and the time of the process's threads are measured; a busy machine affects the latter less. Memory is the process's
peak, including weights and optimizer, minus its memory before it built the model."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from peer_steps import peer_step
from sides import HIDDEN, Child, choice, choices, memory_of, options
from training_samples import LENGTHS, TOKENS, Samples

UNSLOTH = ["unsloth==2026.10.9", "torch==2.14.1"]


def ours(folder: str, arguments: argparse.Namespace, way: str = "lora", quantization: str | None = None):
    from bench_training_step import our_step
    from harness import load_decoder, tune_malloc
    from nemo_rl_cpp.config.lora import LayerKinds

    tune_malloc()
    model, native = load_decoder(folder, arguments.precision, way == "all_weights", quantization)
    if way != "all_weights":
        targets = [f"{m}.weight" for m in LayerKinds(len(native["layers"])).modules()]
        model.adapt(arguments.dim, 4.0 * arguments.dim, targets, merge=way == "lora")
        model.masters.copy_(torch.randn(model.masters.shape, generator=torch.Generator().manual_seed(0)) * 0.01)
        model.masters_changed()
    return our_step(model, TOKENS)


def peft(folder: str, arguments: argparse.Namespace):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.precision, attn_implementation="sdpa")
    config = LoraConfig(r=arguments.dim, lora_alpha=4 * arguments.dim, target_modules="all-linear")
    return peer_step(get_peft_model(base, config).train(), arguments.precision)


def unsloth(folder: str, arguments: argparse.Namespace):
    from unsloth import FastLanguageModel

    base, _ = FastLanguageModel.from_pretrained(folder, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(
        base, r=arguments.dim, lora_alpha=4 * arguments.dim, use_gradient_checkpointing=False
    )

    def loss(model, batch):
        labels = batch.input_ids.masked_fill(~batch.trained, -100)
        return model(batch.input_ids, labels=labels, **batch.options).loss * batch.trained.sum()

    return peer_step(model.train(), arguments.precision, loss)


SIDES = {
    "all_weights": partial(ours, way="all_weights"),
    "lora": ours,
    "apart": partial(ours, way="apart"),
    **{name: partial(ours, way="apart", quantization=name) for name in ("q8_0", "q4_0", "nf4")},
    "peft": peft,
    "unsloth": unsloth,
}


def one_side(arguments: argparse.Namespace) -> None:
    """Run in the child: take a step for every line of standard input, and print seconds, thread seconds, and peak
    memory so far in MB."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a peer prints is not an answer
    torch.set_num_threads(arguments.threads)
    before = memory_of("VmHWM")
    step = SIDES[arguments.side](arguments.model, arguments)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        samples = Samples.random(LENGTHS[arguments.lengths](), arguments.prompt, int(line))
        start, threads = time.perf_counter(), time.process_time()
        step(samples)
        took = [time.perf_counter() - start, time.process_time() - threads, (memory_of("VmHWM") - before) / 2**20]
        print(json.dumps(took), file=answers, flush=True)


def start(name: str, arguments: argparse.Namespace, folder: Path) -> Child:
    python = [sys.executable]
    if name == "unsloth":
        python = ["uv", "run", "--quiet", "--no-project", *(f"--with={package}" for package in UNSLOTH), "python"]
    command = [*python, str(Path(__file__).resolve()), "--side", name]
    command += [
        f"--{key}={getattr(arguments, key)}" for key in ("model", "precision", "dim", "lengths", "prompt", "threads")
    ]
    return Child(name, command, folder=folder)


def main() -> None:
    arguments = options(
        __doc__, precision="bfloat16", dim=8, lengths=choice(*LENGTHS), prompt=0, rounds=5, threads=2,
        sides=choices(SIDES, "all_weights", "lora", "apart", "q8_0", "q4_0", "nf4"), model=HIDDEN, side=HIDDEN,
    )  # fmt: skip
    if arguments.side:
        return one_side(arguments)
    from harness import smollm2

    arguments.model = smollm2()
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: start(name, arguments, Path(folder)) for name in arguments.sides}
        rows: dict[str, list[list[float]]] = {name: [] for name in sides}
        for seed in range(arguments.rounds + 1):
            for name, side in sides.items():
                rows[name].append(side.ask(seed))
        for side in sides.values():
            side.close()
    report(arguments, rows)


def report(arguments: argparse.Namespace, rows: dict[str, list[list[float]]]) -> None:
    """Print the medians of each side, and the ratios to the first side, paired step by step."""
    result: dict[str, object] = {}
    for name, steps in rows.items():
        seconds, of_threads, peaks = zip(*steps[1:], strict=True)
        result[name] = {"seconds": round(statistics.median(seconds), 3), "thread_seconds": round(statistics.median(of_threads), 3), "peak_mb": round(peaks[-1])}  # fmt: skip
    first = rows[arguments.sides[0]]
    for name in arguments.sides[1:]:
        result[f"memory_of_{name}"] = round(rows[name][-1][2] / first[-1][2], 3)
        for column, what in enumerate(("time", "thread_time")):
            ratios = [own[column] / theirs[column] for theirs, own in zip(first[1:], rows[name][1:], strict=True)]
            result[f"{what}_of_{name}"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
    print(json.dumps({"precision": arguments.precision, "dim": arguments.dim, "threads": arguments.threads, **result}))


if __name__ == "__main__":
    main()
