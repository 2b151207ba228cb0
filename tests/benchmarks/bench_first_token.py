"""From the start of a process to its first token, paired: `nemo-rl-cpp generate` against transformers `generate`, the same model and prompt.

    uv run python tests/benchmarks/bench_first_token.py [--rounds 5] [--precision bfloat16 float32]

The first run of each side, which fills the file cache, does not count.
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

import torch

PROMPT = "The capital of France is"
TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, precision, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
with torch.inference_mode():
    out = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, -1]), flush=True)
"""


def commands(folder: str, precision: str) -> dict[str, list[str]]:
    return {
        "ours": [
            sys.executable,
            "-m",
            "nemo_rl_cpp.generate",
            "--model",
            folder,
            "--precision",
            precision,
            "--greedy",
            "--max-new-tokens",
            "1",
            PROMPT,
        ],
        "transformers": [sys.executable, "-c", TRANSFORMERS, folder, precision, PROMPT],
    }


def seconds_to_first_byte(command: list[str]) -> tuple[float, str]:
    environment = {
        k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"
    }  # or every import compiles its source again
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        text = first + process.stdout.read()
        if process.wait() != 0:
            errors.seek(0)
            sys.exit(f"{' '.join(command[:3])} failed:\n{errors.read().decode()}")
    return seconds, text.decode().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", nargs="+", default=["bfloat16"])
    arguments = parser.parse_args()
    from nemo_rl_cpp.hub.sources import resolve_model

    folder = str(resolve_model("smollm2-135m-instruct"))
    rows = {}
    for precision in arguments.precision:
        taken: dict[str, list[float]] = {side: [] for side in commands(folder, precision)}
        for turn in range(arguments.rounds + 1):
            for side, command in commands(folder, precision).items():
                seconds, text = seconds_to_first_byte(command)
                if turn:
                    taken[side].append(seconds)
                else:
                    print(f"{precision} {side} says {text!r}")
        ratios = [b / a for a, b in zip(taken["ours"], taken["transformers"], strict=True)]
        rows[precision] = {side: round(statistics.median(values), 2) for side, values in taken.items()} | {
            "slowest_of_ours": round(max(taken["ours"]), 2),
            "ratio": [round(f(ratios), 1) for f in (statistics.median, min, max)],
        }
        print(precision, rows[precision])
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
