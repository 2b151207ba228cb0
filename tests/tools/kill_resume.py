"""Kills a run again and again at random moments, lets it resume, and compares what it leaves with an unbroken run's.

    python tests/tools/kill_resume.py --kills 20
    python tests/tools/kill_resume.py --config configs/ppo_tiny.yaml --kills 20
    python tests/tools/kill_resume.py --config configs/grpo_arithmetic_smollm2.yaml --kills 3 --steps 6 grpo.max_val_samples=16

Equal by SHA-256 must be: weights, optimizer state, position in the data, training state, and the metrics of every step
but for times and memory. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("timing/", "performance/", "memory/")


def command(config: str, folder: Path, steps: int, overrides: list[str]) -> list[str]:
    is_ppo = Path(config).name.startswith(("ppo", "vapo"))
    program, section = ("run_ppo", "ppo") if is_ppo else ("run_grpo_math", "grpo")
    return [
        sys.executable, "-m", f"nemo_rl_cpp.{program}", "--config", config, f"{section}.max_num_steps={steps}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", f"logger.log_dir={folder / 'logs'}",
        "checkpointing.save_period=2", *overrides,
    ]  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds of an unbroken run: from its start to the end of its first step, and of each step on the average."""

    first_step: float
    step: float


def run_to_end(argv: list[str], environment: dict[str, str]) -> Pace:
    """Runs to the end; RuntimeError with the output when it fails."""
    process = start(argv, environment)
    began, ends, lines = time.monotonic(), [], []
    for line in process.stdout:
        lines.append(line)
        if step_of(line) is not None:
            ends.append(time.monotonic())
    if process.wait() != 0:
        raise RuntimeError(f"the run failed with status {process.returncode}:\n{''.join(lines[-60:])}")
    if not ends:
        return Pace(0.0, 0.0)
    return Pace(ends[0] - began, (ends[-1] - ends[0]) / max(1, len(ends) - 1))


def run_and_kill(argv: list[str], environment: dict[str, str], after_step: int, delay: float) -> bool:
    """Starts the run and kills it, with everything it started, `delay` seconds after the end of step `after_step` (0:
    after the start); False when it had ended by then."""
    process = start(argv, environment)
    if after_step:
        for line in process.stdout:
            if (step_of(line) or 0) >= after_step:
                break
    try:
        process.wait(delay)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    finally:
        process.stdout.close()


def start(argv: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def step_of(line: str) -> int | None:
    """The number of the step that a line of the run reports as done."""
    match = re.match(r"step (\d+)/", line)
    return int(match[1]) if match else None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(folder: Path) -> dict[str, str]:
    """SHA-256 of everything that must not depend on interruptions, by name."""
    checkpoint = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    prints = {
        str(path.relative_to(checkpoint)): sha256(path)
        for path in sorted(checkpoint.rglob("*"))
        # config.yaml and the manifest name folders of this very run, training_info.json the log folder
        if path.is_file() and path.name not in ("config.yaml", "manifest.json", "training_info.json", "config_resolved.yaml")
    }
    info = json.loads((checkpoint / "training_info.json").read_text())
    info.pop("log_dir")
    prints["training_info"] = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
    logs = Path(json.loads((checkpoint / "training_info.json").read_text())["log_dir"])
    prints["metrics"] = hashlib.sha256(json.dumps(metric_rows(logs / "metrics.jsonl")).encode()).hexdigest()
    for path in sorted(logs.glob("*_data_step*.jsonl")):
        prints[path.name] = sha256(path)
    return prints


def metric_rows(path: Path) -> list[dict]:
    """The rows without what depends on time and memory."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]
    return [row for row in kept if set(row) != {"step"}]


def differences(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Names whose fingerprints differ or that only one side has."""
    return sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.split("_")[1]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def check(
    config: str, steps: int, kills: int, overrides: list[str], seed: int, say: Callable[[str], None] = print
) -> list[str]:
    """Runs once unbroken and once with `kills` kills, and returns what differs.

    Each kill comes at a random moment of what is left of the run: a random step, and a random time after its end, so that
    it meets start-up, generation, training, logging and saving alike. A run that got through begins anew in another folder.
    """
    environment, dice = dict(os.environ), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        pace = run_to_end(command(config, whole, steps, overrides), environment)
        say(f"unbroken run: first step after {pace.first_step:.1f} s, then {pace.step:.2f} s a step")
        expected, done = fingerprint(whole), 0
        while done < kills:
            begin = newest_step(broken)
            after = dice.randint(begin, steps - 1)
            delay = dice.uniform(0, pace.first_step if after == begin else 1.5 * pace.step)
            if run_and_kill(command(config, broken, steps, overrides), environment, 0 if after == begin else after, delay):
                done += 1
                found = sorted(path.name for path in (broken / "checkpoints").glob("*step_*"))
                say(f"kill {done} of {kills}: {delay:.2f} s after step {after}; on the disk: {', '.join(found) or 'no checkpoint'}")
            elif problems := differences(expected, fingerprint(broken)):
                return problems
            if newest_step(broken) >= steps:
                broken = broken.with_name(f"{broken.name}_")
        run_to_end(command(config, broken, steps, overrides), environment)
        return differences(expected, fingerprint(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    problems = check(arguments.config, arguments.steps, arguments.kills, overrides, arguments.seed)
    print("equal by SHA-256: weights, optimizer, data position, state, metrics, rollouts" if not problems else f"DIFFERENT: {', '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
