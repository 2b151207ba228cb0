"""Profiles a training step and decode steps with torch's profiler, and prints the kernels with the longest total time.

python tests/tools/card_profile.py [--device cpu]       on a CPU: tiny shapes, to test this program"""

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_gpu_step import PROMPT, QWEN3, SMALL, our_generation, our_model  # noqa: E402
from bench_training_step import our_step  # noqa: E402
from harness import wait_for_device  # noqa: E402
from training_samples import Samples  # noqa: E402


def show(title: str, device: str, run) -> None:
    run()
    wait_for_device()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiled:
        run()
        wait_for_device()
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(f"== {title}")
    print(profiled.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=80), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    config, samples, length, texts, new = (QWEN3, 16, 1024, 256, 32) if device == "cuda" else (SMALL, 2, 32, 2, 4)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, config["vocab_size"], (samples, length), generator=random)
    step = our_step(our_model(config, True, device), samples * length)
    show(f"a training step on {samples * length} tokens", device, lambda: step(Samples.whole(ids)))
    generate = our_generation(our_model(config, False, device), new, False)
    prompts = torch.randint(2, config["vocab_size"], (texts, PROMPT), generator=random)
    show(f"{new} tokens of {texts} texts", device, lambda: generate(prompts))


if __name__ == "__main__":
    main()
