"""Builds the package on a GPU's machine, then runs the tests and benchmarks below, each with a deadline.

    python tests/tools/card.py --download FOLDER --python 3.12      with a network: wheels that the GPU's machine lacks
    python tests/tools/card.py --minutes 40 --out DIR [--wheels FOLDER]     on the GPU's machine, without a network
    python tests/tools/card.py --minutes 9 --out DIR                runs the steps that DIR does not have yet
    python tests/tools/card.py --minutes 5 --out DIR --device cpu   tiny shapes, to test this program
    python tests/tools/card.py --list

The most important steps come first. The output of each step is streamed to DIR/NAME.txt. After each step, DIR/card.json
(how the steps ended, seconds) and DIR/tables.md (the measurements, for docs/benchmarks-in-full.md) are rewritten. The
exit status is 1 if a step failed or had no time."""

import argparse
import importlib.metadata
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "scikit-build-core", "pybind11", "pathspec", "cmeel", "cmeel-yaml-cpp==0.8.0", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
    "typing-extensions", "rich", "markdown-it-py", "mdurl", "pygments", "tensorboardX", "protobuf", "math-verify==0.9.0", "latex2sympy2-extended",
    "antlr4-python3-runtime==4.13.2", "pytest", "pluggy", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers",
)  # fmt: skip
"""What build, package and tests need besides torch, numpy, tokenizers, safetensors, huggingface_hub, transformers."""
TINY = "--device cpu --shape small --samples 2 --length 32 --sequences 2 --repeats 1"

QUANTISED = (
    "python examples/run_grpo_math.py --config configs/grpo_tiny.yaml policy.quantization=q4_0 policy.dtensor_cfg.lora_cfg.enabled=true "
    "policy.precision=bfloat16 grpo.max_num_steps=2 grpo.val_period=0 grpo.val_at_end=false checkpointing.enabled=false logger.log_dir=OUT/quantised "
    "grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=4 policy.train_global_batch_size=16 policy.train_micro_batch_size=4"
)  # fmt: skip
LLAMA_8B = " ".join(
    f"policy.hf_config_overrides.{key}={value}"
    for key, value in dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024, initializer_range=0.02,
    ).items()
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A command with its deadline in minutes. On a CPU `tiny` runs instead; a step without `tiny` is skipped there."""

    name: str
    minutes: float
    what: str
    command: str
    tiny: str = ""

    def line(self, device: str, out: Path) -> list[str]:
        words = shlex.split(self.command if device == "cuda" else self.tiny)
        return [sys.executable if word == "python" else word.replace("OUT", str(out)) for word in words]


def bench(name: str, minutes: float, what: str, script: str, card: str, tiny: str = "") -> Step:
    command = f"python tests/benchmarks/bench_{script}.py --json OUT/{name}.json"
    return Step(name, minutes, what, f"{command} {card}", f"{command} {tiny}" if tiny else "")


STEPS = (
    Step("machine", 1, "what it is", "nvidia-smi", "lscpu"),
    Step("build", 9, "the core for this card and this torch", "python -m pip install --no-build-isolation --no-deps -e ."),
    Step("exactness", 4, "generation equals training, family by family",
         "python tests/tools/exactness.py --device cuda --json OUT/exactness.json",
         "python tests/tools/exactness.py --only llama --json OUT/exactness.json"),
    Step("gpu_tests", 6, "ops, losses, models and NCCL against the CPU", "python -m pytest -q -m gpu tests"),
    Step("quantised_8b", 5, "two GRPO steps of LoRA over 8B in q4_0, random weights: memory/peak_gpu_gb",
         f"{QUANTISED} cluster.device=cuda policy.generation.max_new_tokens=64 policy.max_total_sequence_length=128 {LLAMA_8B}", QUANTISED),
    bench("training", 4, "a step of 0.6B on 16,384 tokens", "gpu_step", "--only training --repeats 3", f"--only training {TINY}"),
    bench("decode", 4, "a decode step of 256 texts", "gpu_step", "--only decode --repeats 3"),
    bench("lm_head", 2, "the head, forward and backward", "lm_head", "--device cuda --tokens 8192 --vocab 151936 --hidden 1024 --dtype bfloat16"),
    Step("profile", 3, "where a training step and decode steps spend their time", "python tests/tools/card_profile.py",
         "python tests/tools/card_profile.py --device cpu"),
    bench("long_training", 4, "a step on four texts of 16,384 tokens", "gpu_step", "--only training --samples 4 --length 16384 --repeats 2"),
    bench("clipped_pg_loss", 1, "loss, gradient, metrics", "clipped_pg_loss", "--device cuda"),
    bench("adamw", 1, "the optimizer", "adamw", "--device cuda", "--repeats 1 --parameters 4096"),
    Step("memcheck", 8, "no kernel reads or writes outside its memory",
         "compute-sanitizer --tool memcheck --report-api-errors no python -m pytest -q -x -m gpu tests"),
    bench("cpu_products", 2, "products by shape on the machine's CPU", "linear", "--precision bfloat16"),
    bench("cpu_lm_head", 3, "the head on the machine's CPU", "lm_head", "--repeats 3"),
)  # fmt: skip
"""In order of importance, because the last steps may not have enough time."""


def run(step: Step, device: str, out: Path, seconds: float) -> dict[str, object]:
    """Run a step for at most `seconds`, and return how it ended."""
    begun, limit = time.monotonic(), min(60 * step.minutes, seconds)
    with (out / f"{step.name}.txt").open("w") as file:
        try:
            done = subprocess.run(
                step.line(device, out), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            )
            ended = "done" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        except OSError as error:
            ended = str(error)
    return {"ended": ended, "seconds": round(time.monotonic() - begun, 1)}


def tables(out: Path, results: dict[str, dict[str, object]]) -> Iterator[str]:
    """Yield the lines of tables.md: the steps, then the measurements of each benchmark."""
    yield from ("| step | shows | ended | seconds |", "|---|---|---|---|")
    for step in STEPS:
        if step.name in results:
            yield f"| {step.name} | {step.what} | {results[step.name]['ended']} | {results[step.name]['seconds']} |"
    for step in STEPS:
        file = out / f"{step.name}.json"
        if step.name not in results or not file.exists():
            continue
        found = json.loads(file.read_text())
        yield f"\n## {step.name}: {step.what}\n"
        if isinstance(found, dict):
            yield ", ".join(f"{key} {value}" for key, value in found.items() if key != "rows") + "\n"
            yield from ("| what | side | median, ms | quartiles | figures |", "|---|---|---|---|---|")
            for row in found["rows"]:
                figures = {k: v for k, v in row.items() if k not in ("what", "side", "median_s", "low_s", "high_s")}
                said = ", ".join(f"{k} {v:.3g}" for k, v in figures.items())
                median, low, high = (1e3 * row[key] for key in ("median_s", "low_s", "high_s"))
                yield f"| {row['what']} | {row['side']} | {median:.3f} | {low:.3f} to {high:.3f} | {said} |"
        else:
            yield from ("| " + " | ".join(found[0]) + " |", "|---" * len(found[0]) + "|")
            yield from ("| " + " | ".join(map(str, row.values())) + " |" for row in found)


def install(wheels: Path) -> None:
    """Install the wheels in a folder whose packages are missing."""

    def is_missing(wheel: Path) -> bool:
        try:
            importlib.metadata.version(wheel.name.split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            return True
        return False

    missing = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if is_missing(wheel)]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *missing], check=True)


def download(folder: Path, python: str) -> None:
    """Download the wheels of PACKAGES for x86-64 and a version of Python."""
    platforms = [f"--platform=manylinux{which}_x86_64" for which in ("_2_28", "_2_27", "_2_17", "2014")]
    for package in PACKAGES:
        line = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
            f"--python-version={python}",
        ]  # fmt: skip
        subprocess.run([*line, *platforms, "-d", str(folder), package], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--out", type=Path, default=Path("results/card"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--download", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="of the machine with the card, for --download")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    steps = [step for step in STEPS if arguments.device == "cuda" or step.tiny]
    if arguments.list:
        print(*(f"{step.minutes:4} min  {step.name:16} {step.what}" for step in steps), sep="\n")
        return 0
    if arguments.download:
        download(arguments.download, arguments.python)
        return 0
    if arguments.wheels:
        install(arguments.wheels)
    out, deadline = arguments.out.resolve(), time.monotonic() + 60 * arguments.minutes
    out.mkdir(parents=True, exist_ok=True)
    record = out / "card.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    for step in steps:
        left = deadline - time.monotonic()
        if results.get(step.name, {}).get("ended") == "done" or left < 5:
            continue
        results[step.name] = run(step, arguments.device, out, left)
        print(f"{step.name}: {results[step.name]['ended']}, {results[step.name]['seconds']} s", flush=True)
        record.write_text(json.dumps(results, indent=1) + "\n")
        (out / "tables.md").write_text("\n".join(tables(out, results)) + "\n")
    missing = [step.name for step in steps if results.get(step.name, {}).get("ended") != "done"]
    if missing:
        print(f"not done: {', '.join(missing)}; their output is in {out}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
