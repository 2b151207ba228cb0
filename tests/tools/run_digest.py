"""Digests of short runs of every kind, to verify that a change keeps the results bit-identical.

    python tests/tools/run_digest.py --out before.json           all kinds
    python tests/tools/run_digest.py --out after.json --against before.json
    python tests/tools/run_digest.py --only grpo ppo multi_turn  some of them

A digest covers weights, optimizer state and the metrics of all steps except times and memory. The exit status is 1 if a
digest differs."""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kill_resume import command, metric_rows, newest_step, run_to_end, sha256

SMOLLM2, FEW = "configs/grpo_arithmetic_smollm2.yaml", "grpo.max_val_samples=16"
RUNS = {
    "grpo": ("configs/grpo_tiny.yaml", 12, ()),
    "dapo": ("configs/dapo_tiny.yaml", 12, ()),
    "prorlv2": ("configs/prorlv2_tiny.yaml", 12, ()),
    "rloo": ("configs/rloo_tiny.yaml", 12, ()),
    "ppo": ("configs/ppo_tiny.yaml", 8, ()),
    "vapo": ("configs/vapo_tiny.yaml", 8, ()),
    "ppo_raw_reward": ("configs/ppo_tiny_raw_reward.yaml", 8, ()),
    "multi_turn": ("configs/grpo_guess_number.yaml", 4, ()),
    "smollm2_bfloat16": (SMOLLM2, 3, (FEW,)),
    "smollm2_float32": (SMOLLM2, 3, (FEW, "policy.precision=float32")),
}


def digest(name: str) -> dict[str, str]:
    """Return the SHA-256 digests of the weights, the optimizer state and the metrics of a run in RUNS."""
    config, steps, overrides = RUNS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_to_end(command(config, folder, steps, list(overrides)), dict(os.environ))
        checkpoint = folder / "checkpoints" / f"step_{newest_step(folder)}"
        tensors = sorted(path for path in checkpoint.rglob("*.safetensors") if "trainer_state" not in path.parts)
        metrics = json.dumps([metric_rows(path) for path in sorted(folder.rglob("metrics.jsonl"))])
        return {str(path.relative_to(checkpoint)): sha256(path) for path in tensors} | {
            "metrics": hashlib.sha256(metrics.encode()).hexdigest()
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file of an earlier run, to compare with")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.against.read_text()) if arguments.against else {}
    found, different = {}, []
    for name in arguments.only:
        found[name] = digest(name)
        same = "" if name not in earlier else ": equal" if earlier[name] == found[name] else ": DIFFERENT"
        different += [name] if same.endswith("DIFFERENT") else []
        print(f"{name}{same} {json.dumps({key: value[:12] for key, value in found[name].items()})}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
