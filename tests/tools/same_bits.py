"""Trains the same runs on several numbers of processes, and compares what they have learned by SHA-256 of the weights.

    python tests/tools/same_bits.py
    python tests/tools/same_bits.py --only grpo --executors processes --sizes 1 2

With `policy.gradient_blocks=4` all digests of a line must be equal. Then GRPO runs without it in float32, where only the order of sums differs: the
distance to the weights of one process, divided by their norm, must be at most 1e-6 (by default after --ratio-steps steps; each step may also
sample another token where two probabilities are nearly equal, so long runs part sooner or later). Exit status 1 if anything differs.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from kill_resume import command, newest_step, run_to_end, sha256

RUNS = {
    "grpo": ("configs/grpo_tiny.yaml", ()),
    "ppo": ("configs/ppo_tiny.yaml", ()),
    "dapo": ("configs/dapo_tiny.yaml", ("grpo.use_dynamic_sampling=true",)),
    "multi_turn": ("configs/grpo_guess_number.yaml", ()),
}
MOST = 1e-6  # of the norm of the weights


def trained(name: str, executor: str, size: int, steps: int, folder: Path, *overrides: str) -> dict[str, Path]:
    """The files of the weights after so many steps, by their names in the checkpoint."""
    config, own = RUNS[name]
    section = "ppo" if name == "ppo" else "grpo"
    sizes = (
        "cluster.num_nodes=1",
        f"cluster.gpus_per_node={size}",
        f"cluster.executor={executor}",
        "cluster.cpus_per_worker=1",
    )
    quick = (
        "checkpointing.save_period=100000",
        f"{section}.val_period=0",
        f"{section}.val_at_end=false",
        f"{section}.val_at_start=false",
    )
    run_to_end(command(config, folder, steps, [*own, *sizes, *quick, *overrides]), dict(os.environ))
    if newest_step(folder) != steps:
        raise RuntimeError(f"{name} with {size} {executor} has no checkpoint of step {steps} in {folder}")
    checkpoint = folder / "checkpoints" / f"step_{steps}"
    return {str(path.relative_to(checkpoint)): path for path in sorted(checkpoint.rglob("weights/*.safetensors"))}


def flat(files: dict[str, Path]) -> torch.Tensor:
    parts = []
    for _, path in sorted(files.items()):
        tensors = load_file(path)
        parts += [tensors[name].flatten().double() for name in sorted(tensors)]
    return torch.cat(parts)


def compare_bits(name: str, arguments: argparse.Namespace, scratch: Path) -> bool:
    """Prints a line a run; whether all have the same weights."""
    digests = set()
    for executor in arguments.executors:
        for size in arguments.sizes:
            began = time.monotonic()
            folder = scratch / f"{name}-{executor}-{size}"
            files = trained(name, executor, size, arguments.steps, folder, "policy.gradient_blocks=4")
            found = {part: sha256(path) for part, path in files.items()}
            digests.add(tuple(sorted(found.items())))
            words = "  ".join(f"{part} {digest}" for part, digest in found.items())
            print(f"{name:10} {executor:9} N={size} {time.monotonic() - began:5.0f} s  {words}", flush=True)
    same = len(digests) == 1
    print(f"{name}: {'EQUAL in all' if same else 'DIFFERENT'} after {arguments.steps} steps", flush=True)
    return same


def compare_norms(arguments: argparse.Namespace, scratch: Path) -> bool:
    """Of GRPO without blocks; whether the distances are those of roundings."""
    first, right = None, True
    for size in arguments.sizes:
        now = flat(
            trained("grpo", "processes", size, arguments.ratio_steps, scratch / f"norm-{size}", "policy.precision=float32")
        )  # fmt: skip
        if first is None:
            first = now
        ratio = float((now - first).norm() / first.norm())
        right &= ratio <= MOST
        print(
            f"grpo without gradient_blocks, float32, N={size}: norm ratio {ratio:.3g} after {arguments.ratio_steps} steps",
            flush=True,
        )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--executors", nargs="+", choices=("processes", "ray"), default=["processes", "ray"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ratio-steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        right = [compare_bits(name, arguments, Path(scratch)) for name in arguments.only]
        right.append(compare_norms(arguments, Path(scratch)))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
