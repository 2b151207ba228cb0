"""The step of the first run with one and two threads, alone and next to busy processes: the effect of waiting threads.

    uv run python tests/benchmarks/bench_busy_machine.py [--rounds 5] [--neighbours 0 1 2]

A side is a process with a run of configs/grpo_arithmetic_smollm2.yaml that takes one step on request. So the sides take
turns, step by step, and other load on the machine affects all of them. A neighbour is a process that computes all the
time. The sides:

    1 thread
    libgomp     two threads that wait as libgomp does by default: they spin 300,000 times, which takes milliseconds
    bounded     two threads with the spin count of nemo_rl_cpp
    passive     two threads that never spin

Each side needs about 2.5 GB of memory."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import HIDDEN, Child, options

SIDES: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "libgomp": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "300000"},
    "bounded": {"OMP_NUM_THREADS": "2"},
    "passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
}
NEIGHBOUR = "x = 1\nwhile True:\n    x = (x * 1103515245 + 12345) % 2147483648\n"


def side(folder: str) -> None:
    """Take a step for each line of standard input, and print its seconds."""
    import nemo_rl_cpp
    from nemo_rl_cpp.report.progress import Progress

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    class Gate(Progress):
        began = time.perf_counter()

        def step(self, step: int, metrics: object = None) -> None:
            print(time.perf_counter() - self.began, file=answers, flush=True)
            sys.stdin.readline()
            self.began = time.perf_counter()

    config = nemo_rl_cpp.load_grpo_config(
        "grpo_arithmetic_smollm2.yaml",
        [
            "grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false",
            "checkpointing.enabled=false", "logger.tensorboard_enabled=false", "logger.report=false", f"logger.log_dir={folder}",
        ],
    )  # fmt: skip
    with nemo_rl_cpp.build_run(config) as run:
        run.terminal.progress.close()
        run.terminal.progress = Gate(None, 0, "quiet")
        run.train()


def start(name: str, environment: dict[str, str]) -> Child:
    chosen = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))} | environment
    folder = tempfile.mkdtemp(prefix="busy_")
    return Child(name, [sys.executable, __file__, "--side", folder], chosen)


def measure(arguments: argparse.Namespace) -> None:
    """Print the seconds of a step of each side, with each number of neighbours."""
    names = list(SIDES)
    processes = {name: start(name, SIDES[name]) for name in names}
    try:
        for count in arguments.neighbours:
            busy = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(count)]
            try:
                rows = {name: [] for name in names}
                for turn in range(arguments.rounds):
                    for name in names[turn % len(names) :] + names[: turn % len(names)]:
                        rows[name].append(processes[name].ask("go"))
            finally:
                for neighbour in busy:
                    neighbour.kill()
                    neighbour.wait()
            show(count, rows)
    finally:
        for child in processes.values():
            child.process.kill()


def show(count: int, rows: dict[str, list[float]]) -> None:
    """Print the medians, and each side's median ratio to the faster of one and two threads in the same round."""
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{count} busy neighbours, load {load}", flush=True)
    for name, seconds in rows.items():
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        better = map(min, rows["1 thread"], rows["libgomp"])
        ratio = statistics.median(own / best for own, best in zip(seconds, better))
        print(
            f"  {name:<9} {statistics.median(seconds):7.2f} s  [{quartiles[0]:.2f}, {quartiles[2]:.2f}]   {ratio:.2f} of the better of "
            "1 thread and libgomp",
            flush=True,
        )


def main() -> None:
    arguments = options(__doc__, rounds=5, neighbours=[0, 1, 2], side=HIDDEN)
    if arguments.side is not None:
        return side(arguments.side)
    measure(arguments)


if __name__ == "__main__":
    main()
