"""`nemo-rl-cpp doctor`: what this machine and this installation are, and whether three tiny steps train exactly."""

from collections.abc import Sequence
from typing import NamedTuple

from nemo_rl_cpp.command_line import command_parser

_EXAMPLES = """examples:
  nemo-rl-cpp doctor
  nemo-rl-cpp doctor --no-train     # the facts alone, within a second or two

The output names no file of yours: it may go into a bug report as it is."""


class Exactness(NamedTuple):
    """What a self-test found: steps, the largest gap between trainer and generator, the tokens that differed, digests of the
    weights after each step, and its seconds."""

    steps: int
    largest_gap: float
    mismatched_tokens: int
    digests: list[str]
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Prints the facts and the self-test; the status is 1 where something is wrong."""
    parser = command_parser(
        "doctor", "Look at this machine and this installation, and train three tiny steps.", _EXAMPLES
    )
    parser.add_argument("--no-train", action="store_true", help="leave the self-test out")
    parser.add_argument("--seconds", type=float, default=60.0, help="what the self-test may take (default: 60)")
    known = parser.parse_args(arguments)
    return _examine(known.no_train, known.seconds)


def _examine(no_train: bool, seconds: float) -> int:
    from nemo_rl_cpp.commands.machine import facts

    wrong = 0
    for title, rows in facts():
        print(title)
        width = max((len(row.name) for row in rows), default=0) + 2
        for row in rows:
            print(f"  {row.mark} {row.name:<{width}}{row.value}")
            if row.advice:
                print(f"    {'':<{width}}{row.advice}")
            wrong += row.mark == "✗"
        print()
    if not no_train:
        wrong += _self_test(seconds)
    print(
        "Nothing is wrong."
        if not wrong
        else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong: see the lines with ✗."
    )
    return 1 if wrong else 0


def _self_test(seconds: float) -> int:
    """The number of things that are wrong."""
    import os

    cores = len(os.sched_getaffinity(0))
    print(
        f"self-test: three steps of grpo_tiny.yaml, {'first with one thread, then with all' if cores > 1 else 'with one thread'}"
    )
    found: list[Exactness] = []
    for threads, name in ((1, "one thread"), (cores, f"{cores} threads"))[: 2 if cores > 1 else 1]:
        result = train_tiny(threads, seconds - sum(one.seconds for one in found))
        if result is None:
            return _out_of_time(name, seconds, is_first=not found)
        if isinstance(result, str):
            print(f"  ✗ {name}: {result}\n")
            return 1
        found.append(result)
        exact = result.steps == 3 and result.largest_gap == 0 and result.mismatched_tokens == 0
        print(
            f"  {'✓' if exact else '✗'} {name}: {result.steps} steps in {result.seconds:.1f} s, start included; largest "
            f"log-probability gap between trainer and generator {result.largest_gap:.3g}, tokens that differ {result.mismatched_tokens}"
        )
        if not exact:
            return 1
    if len(found) == 1:
        print("  · this process has one core: whether more threads give the same weights was not tested\n")
        return 0
    same = found[0].digests == found[1].digests
    print(f"  {'✓ the same' if same else '✗ other'} weights, bit for bit, with one thread and with all\n")
    return 0 if same else 1


def _out_of_time(name: str, seconds: float, is_first: bool) -> int:
    """One thread is enough to know whether the arithmetic is right; that more are slow is only worth a look."""
    print(
        f"  {'✗' if is_first else '!'} {name}: no end within the {seconds:g} s of the whole test. Where the machine is busy, give it"
    )
    print(
        "    more (--seconds 300); where it is not, threads wait for one another: fewer may be faster (OMP_NUM_THREADS)\n"
    )
    return 1 if is_first else 0


def train_tiny(threads: int, seconds: float) -> Exactness | str | None:
    """Trains three steps in a process of its own; a text says what went wrong, None that there was not enough time."""
    import os
    import subprocess
    import sys
    import tempfile
    import time

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nemo_rl_doctor") as folder:
        command = [
            sys.executable, "-m", "nemo_rl_cpp.cli", "train", "--config", "grpo_tiny.yaml", "grpo.max_num_steps=3", "grpo.val_at_end=false",
            "checkpointing.enabled=false", "logger.log_dir=logs", "logger.report=false", "grpo.num_prompts_per_step=8",
            "policy.train_global_batch_size=64", "policy.train_micro_batch_size=64",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(seconds, 1.0),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return f"it ended with status {done.returncode}: {lines[-1] if lines else 'without a word'}"
        return _read(folder, time.monotonic() - began)


def _read(folder: str, seconds: float) -> Exactness | str:
    from pathlib import Path

    from nemo_rl_cpp.files.durable import json_rows

    with open(Path(folder) / "logs" / "exp_001" / "metrics.jsonl", encoding="utf-8") as file:
        rows = [row for row in json_rows(file) if "train/loss" in row]
    if not all("train/max_logprob_gap" in row and "train/logprob_mismatched_tokens" in row for row in rows):
        return "its metrics do not say whether trainer and generator agree"
    if not all(isinstance(row.get("train/weights/digest"), str) for row in rows):
        return "its metrics do not hold a digest of the weights after each step"
    return Exactness(
        steps=len(rows),
        largest_gap=max((float(str(row["train/max_logprob_gap"])) for row in rows), default=0.0),
        mismatched_tokens=sum(int(float(str(row["train/logprob_mismatched_tokens"]))) for row in rows),
        digests=[str(row["train/weights/digest"]) for row in rows],
        seconds=seconds,
    )
