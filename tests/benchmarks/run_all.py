"""Runs every benchmark with the settings of docs/benchmarks-in-full.md, and writes the output of each to a file.

    uv run python tests/benchmarks/run_all.py [--out results/benchmarks] [--only training_step lm_head ...]

That page is made from these files. All benchmarks take about an hour and a half on two cores, with nothing else
running. Scripts that fail are named at the end; the others still run."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RUNS = {
    "clipped_pg_loss": "clipped_pg_loss --repeats 31",
    "adamw": "adamw --repeats 15",
    "linear": "linear --precision bfloat16",
    "attention": "attention --model SmolLM2-135M",
    "first_token": "first_token",
    "drafts": "drafts",
    "decode_step": "decode_step --precision bfloat16",
    "vllm": "generation_engines --batches 16 64 --rounds 5 --peers vllm vllm_compiled",
    "llama_cpp": "generation_engines --batches 1 --rounds 15 --peers vllm vllm_compiled llama_cpp",
    "llama_cpp_q8_0": "generation_engines --batches 1 16 --prompts distinct --rounds 7 --peers llama_cpp --precision q8_0",
    "llama_cpp_q4_0": "generation_engines --batches 1 16 --prompts distinct --rounds 7 --peers llama_cpp --precision q4_0",
    "training_step": "training_step --rounds 9 --precision bfloat16",
    "training_step_grpo": "training_step --rounds 9 --precision bfloat16 --prompt 40",
    # a peer's padded batch needs so much memory that it gets a separate run
    "training_step_mixed": "training_step --rounds 9 --precision bfloat16 --lengths mixed --sides ours ours_halved transformers_packed"
    " transformers_tuned_sorted",
    "training_step_padded": "training_step --rounds 5 --precision bfloat16 --lengths mixed --sides ours transformers",
    "training_step_float32": "training_step --rounds 3 --precision float32",
    "training_step_qwen3.5": "training_step --rounds 3 --precision bfloat16 --shape qwen3.5 --sides ours transformers"
    " transformers_tuned",
    "training_step_olmoe": "training_step --rounds 3 --precision bfloat16 --shape olmoe --sides ours transformers"
    " transformers_tuned",
    "training_step_gemma3": "training_step --rounds 3 --precision bfloat16 --shape gemma3 --sides ours transformers"
    " transformers_tuned",
    "decode_step_qwen3.5": "decode_step --precision bfloat16 --shape qwen3.5",
    "decode_step_olmoe": "decode_step --precision bfloat16 --shape olmoe",
    "decode_step_gemma3": "decode_step --precision bfloat16 --shape gemma3",
    "vllm_qwen3.5": "generation_engines --shape qwen3.5 --prompts distinct --rounds 2",
    "vllm_olmoe": "generation_engines --shape olmoe --prompts distinct --rounds 2",
    "vllm_gemma3": "generation_engines --shape gemma3 --prompts distinct --rounds 2 --peers vllm llama_cpp",
    "grpo_step": "grpo_step --steps 4 --rounds 3",
    "lm_head": "lm_head --repeats 3",
    "lora": "training_step --rounds 9 --precision bfloat16 --sides ours lora apart q8_0 q4_0 nf4",
    "adapters": "adapters",
    "refit": "refit --repeats 15",
    "refit_delta": "refit --changed 0.01 0.1 0.3",
    "ranks": "ranks",
    "busy_machine": "busy_machine --rounds 5",
    "tinker": "tinker --rounds 5",
    "weights_in_flight": "weights_in_flight",
    "weights_in_flight_long": "weights_in_flight --new 64",
}


def run(command: str, out: Path) -> bool:
    """Run a command, write its output to `out` and to the terminal, and return whether it succeeded."""
    script, *arguments = command.split()
    line = [sys.executable, str(HERE / f"bench_{script}.py"), *arguments]
    with (
        out.open("w") as file,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for text in process.stdout:
            file.write(text)
            print(text, end="", flush=True)
    return process.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        start = time.perf_counter()
        print(f"== {name}: bench_{RUNS[name]}", flush=True)
        if not run(RUNS[name], arguments.out / f"{name}.txt"):
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; their output is in {arguments.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
