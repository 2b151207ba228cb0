"""Seconds from the start of a process to its first token: `nemo-rl-cpp generate` compared with transformers `generate`.

    uv run python tests/benchmarks/bench_first_token.py [--repeats 5] [--precision bfloat16 float32] [--json out.json]

Both use the same model and prompt, and their runs are paired. The first run of each side, which fills the file cache,
does not count."""

import os
import statistics
import subprocess
import sys
import tempfile
import time

from harness import Times, begin, smollm2

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


def until_the_first_byte(command: list[str]) -> float:
    """Return the seconds from the start of a process to its first byte of output."""
    # otherwise every import would compile its source again
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
        if process.wait() != 0:
            errors.seek(0)
            sys.exit(f"{' '.join(command[:3])} failed:\n{errors.read().decode()}")
    return seconds


def main() -> None:
    report = begin(__doc__, 5, precision=["bfloat16"])
    folder = smollm2()
    for precision in report.args.precision:
        options = ["--model", folder, "--precision", precision, "--greedy", "--max-new-tokens", "1"]
        sides = {
            "ours": [sys.executable, "-m", "nemo_rl_cpp.generate", *options, PROMPT],
            "transformers": [sys.executable, "-c", TRANSFORMERS, folder, precision, PROMPT],
        }
        rows: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(report.args.repeats + 1):
            for side, command in sides.items():
                seconds = until_the_first_byte(command)
                if turn:
                    rows[side].append(seconds)
        for side, seconds in rows.items():
            ratio = statistics.median(own / ours for own, ours in zip(seconds, rows["ours"], strict=True))
            report.add(f"first token, {precision}", side, Times.of(seconds), slowest=max(seconds), ratio=ratio)
    report.finish()


if __name__ == "__main__":
    main()
