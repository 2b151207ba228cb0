"""Rollouts beside training, one step off: learns the tiny task from several seeds, and prints what each has come to.

    python tests/tools/learn_async.py
    python tests/tools/learn_async.py --seeds 1 2 3 --age 2 --steps 800

One process trains, one generates with weights of its own (`grpo.async_grpo`). A row says the accuracy on numbers that were not trained on, by
steps, and the smallest and largest `sampling_importance_ratio`, the mean of present probability over generation's: exactly 1 in steps
whose samples have the trainer's own version, near 1 in those that are stale. Exit status 1 if a seed stays below `--accuracy`, or a step of the
first kind has another ratio.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kill_resume import command, run_to_end

BESIDE = (
    "cluster.executor=processes", "cluster.gpus_per_node=2", "cluster.cpus_per_worker=1", "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1", "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true", "checkpointing.enabled=false", "grpo.val_at_end=true",
)  # fmt: skip


def learned(seed: int, steps: int, age: int, overrides: list[str]) -> list[dict]:
    """The rows of one run's metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        own = (f"grpo.seed={seed}", f"grpo.async_grpo.max_trajectory_age_steps={age}", "grpo.val_period=100")
        run_to_end(
            command("configs/grpo_tiny.yaml", Path(scratch), steps, [*BESIDE, *own, *overrides]), dict(os.environ)
        )
        (path,) = Path(scratch).rglob("metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--age", type=int, default=1, help="grpo.async_grpo.max_trajectory_age_steps")
    parser.add_argument("--accuracy", type=float, default=0.85)
    arguments, overrides = parser.parse_known_args()
    learners = 0
    for seed in arguments.seeds:
        began = time.monotonic()
        rows = learned(seed, arguments.steps, arguments.age, overrides)
        accuracy = {row["step"]: row["validation/accuracy"] for row in rows if "validation/accuracy" in row}
        ratios = {True: [], False: []}  # whether the step's samples were stale
        for row in rows:
            if "train/sampling_importance_ratio" in row:
                ratios[row["train/stale_samples"] > 0].append(row["train/sampling_importance_ratio"])
        exact = set(ratios[False]) <= {1.0}
        good = accuracy[arguments.steps] >= arguments.accuracy and exact
        learners += good
        print(
            f"seed {seed}: accuracy " + ", ".join(f"{value:.2f} after step {step}" for step, value in accuracy.items())
            + f"; {len(ratios[False])} steps on the trainer's version, ratio {'1' if exact else ratios[False]}; {len(ratios[True])} stale steps, ratio "
            + (f"{min(ratios[True]):.4f} to {max(ratios[True]):.4f}" if ratios[True] else "none")
            + f"; {time.monotonic() - began:.0f} s",
            flush=True,
        )  # fmt: skip
    print(f"{learners} seeds of {len(arguments.seeds)} learn the task")
    return 0 if learners == len(arguments.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
