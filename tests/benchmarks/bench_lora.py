"""Time and peak memory of a training step with LoRA, merged and separate, compared with a step of all weights.

    uv run python tests/benchmarks/bench_lora.py [--precision bfloat16] [--dim 8] [--rounds 5] [--lengths mixed]
        [--prompt 0] [--sides lora apart q4_0 nf4]

SmolLM2-135M is trained on the samples of bench_training_step.py, 2,048 tokens: forward, loss, backward, clipping,
AdamW, and with `lora` the merge of all adapters (`apart`: lora_cfg.merge false; `q8_0`, `q4_0` and `nf4`: over a
quantised base). Times and memory are also given relative to the first side.

Each side runs in a separate process. The sides take turns after each step, and the first step is a warm-up. Wall-clock
time and the time of the process's threads are measured; a busy machine affects the latter less. Memory is the process's
peak, including weights and optimizer, minus its memory before it built the model."""

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch
from bench_training_step import LENGTHS, TOKENS, our_step
from harness import load_decoder, peak_mb, smollm2, tune_malloc
from sides import choice, choices, options
from training_samples import Samples

QUANTISED = ("q8_0", "q4_0", "nf4")
WAYS = ("all_weights", "lora", "apart", *QUANTISED)


def side(connection: Connection, folder: str, arguments: argparse.Namespace, way: str) -> None:
    """Run in a child process. For each seed send [seconds of the step, thread seconds, peak MB so far]."""
    from nemo_rl_cpp.config.lora import LayerKinds

    tune_malloc()
    torch.set_num_threads(arguments.threads)
    before = peak_mb()
    quantization = way if way in QUANTISED else None
    model, native = load_decoder(folder, arguments.precision, way == "all_weights", quantization)
    if way != "all_weights":
        targets = [f"{m}.weight" for m in LayerKinds(len(native["layers"])).modules()]
        model.adapt(arguments.dim, 4.0 * arguments.dim, targets, merge=way == "lora")
        model.masters.copy_(torch.randn(model.masters.shape, generator=torch.Generator().manual_seed(0)) * 0.01)
        model.masters_changed()
    step = our_step(model, TOKENS)
    for seed in iter(connection.recv, None):
        samples = Samples.random(LENGTHS[arguments.lengths](), arguments.prompt, seed)
        start, threads = time.perf_counter(), time.process_time()
        step(samples)
        connection.send([time.perf_counter() - start, time.process_time() - threads, peak_mb() - before])


def main() -> None:
    arguments = options(
        __doc__, precision="bfloat16", dim=8, lengths=choice(*LENGTHS), prompt=0, rounds=5, threads=2, sides=choices(WAYS)
    )  # fmt: skip
    folder, context = smollm2(), multiprocessing.get_context("spawn")
    ends, processes = {}, []
    for name in arguments.sides:
        ends[name], theirs = context.Pipe()
        processes.append(context.Process(target=side, args=(theirs, folder, arguments, name)))
        processes[-1].start()
    rows: dict[str, list[list[float]]] = {name: [] for name in ends}
    for seed in range(arguments.rounds + 1):
        for name, end in ends.items():
            end.send(seed)
            rows[name].append(end.recv())
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(None)
        process.join()
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
