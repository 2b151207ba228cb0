"""GRPO with weights that change in the middle of responses, against the same asynchronous run without: what the swaps cost.

    uv run python tests/benchmarks/bench_weights_in_flight.py [--rounds 3] [--steps 8] [--age 2] [--new 64] [--config grpo_tiny.yaml]

The run is the quickstart (configs/grpo_arithmetic_smollm2.yaml: 16 prompts x 8 responses of up to 6 tokens) with one process that trains and
one that generates, `--age` steps ahead. With `--new` every response has exactly so many tokens. The sides are `off`, and
`in_flight_weight_updates` with the KV cache `kept` or `recomputed`; every response pauses after half of its tokens. Each side of each round is
a run of its own, and the sides take turns. Of a run, the steps count that follow its first batches, which one version samples alone.

`ratio` is the median step of a side over that of `off` in the same round: it contains everything that a swap costs. `swap` is the share of
a step in which the engines get the weights, so that nothing trains and nothing is generated; `off` has one, too, between two batches. `waits`
is the share in which training waits for generation. Figures are medians with quartiles, the ratio's over rounds, the others over steps.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile

from harness import spread
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.config import load_grpo_config
from sides import options

SECTION = "grpo.async_grpo"
SIDES = {
    "off": (),
    "kept": (f"{SECTION}.in_flight_weight_updates=true",),
    "recomputed": (
        f"{SECTION}.in_flight_weight_updates=true", f"{SECTION}.recompute_kv_cache_after_weight_updates=true",
    ),
}  # fmt: skip
STEP, SWAP, WAITS = "total_step_time", "prepare_for_generation/total", "exposed_generation"


def overrides(side: str, arguments: argparse.Namespace, folder: str) -> list[str]:
    given = [
        f"{SECTION}.enabled=true", f"{SECTION}.max_trajectory_age_steps={arguments.age}", *SIDES[side],
        "policy.generation.colocated.enabled=false", "loss_fn.use_importance_sampling_correction=true",
        f"grpo.max_num_steps={arguments.age + 1 + arguments.steps}", "grpo.max_num_epochs=1000", "grpo.val_period=0",
        "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.enabled=false", "logger.report=false",
        "logger.tensorboard_enabled=false", f"logger.log_dir={folder}",
    ]  # fmt: skip
    if arguments.new is not None:
        given += [
            f"policy.generation.max_new_tokens={arguments.new}", "policy.generation.stop_strings=null",
            "policy.generation.stop_token_ids=[]",
        ]  # fmt: skip
    return given


def steps_of(side: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train one run, and return the seconds of the stages of each step that counts."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with build_run(load_grpo_config(arguments.config, overrides(side, arguments, folder))) as run:
            run.after_step.append(lambda result: rows.append(run.timer.sums()))
            run.train()
            newer = [row.get("total_tokens_of_newer_weights", 0) for row in run.history]
    counted = slice(arguments.age + 1, None)
    if (side != "off") != all(newer[counted]):
        raise RuntimeError(f"{side}: tokens of newer weights in the steps: {newer}")
    return rows[counted]


def main() -> None:
    arguments = options(
        __doc__, rounds=3, steps={"type": int, "default": 8, "help": "that count, of each run"},
        age={"type": int, "default": 2, "help": "max_trajectory_age_steps"}, config="grpo_arithmetic_smollm2.yaml",
        new={"type": int, "help": "tokens of every response; by default those of the configuration"},
    )  # fmt: skip
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            found = steps_of(side, arguments)
            rows[side] += found
            medians[side].append(statistics.median(row[STEP] for row in found))
            print(f"round {number}, {side}: {medians[side][-1]:.3f} s a step", flush=True)
    figures = {
        side: {
            "step_s": round(statistics.median(medians[side]), 3),
            "ratio": spread([a / b for a, b in zip(medians[side], medians["off"], strict=True)]),
            "swap": spread([row.get(SWAP, 0.0) / row[STEP] for row in rows[side]]),
            "waits": spread([row.get(WAITS, 0.0) / row[STEP] for row in rows[side]]),
        }
        for side in SIDES
    }
    for side, of_side in figures.items():
        print(f"{side:11}", "  ".join(f"{name} {value}" for name, value in of_side.items()))
    print(json.dumps({"arguments": vars(arguments), **figures}))


if __name__ == "__main__":
    main()
