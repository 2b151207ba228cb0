"""Kills a run again and again at random moments, lets it resume, and compares what it leaves with an unbroken run's.

    python tests/tools/kill_resume.py --kills 20
    python tests/tools/kill_resume.py --config configs/grpo_arithmetic_smollm2.yaml --kills 3 --steps 6 grpo.max_val_samples=16

Equal by SHA-256 must be: weights, optimizer state, position in the data, training state, and the metrics of every step
but for times and memory. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("timing/", "performance/", "memory/")


def command(config: str, folder: Path, steps: int, overrides: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "nemo_rl_cpp.run_grpo_math", "--config", config, f"grpo.max_num_steps={steps}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", f"logger.log_dir={folder / 'logs'}", *overrides,
    ]  # fmt: skip


def run_to_end(argv: list[str], environment: dict[str, str]) -> float:
    """Seconds that the run took; CalledProcessError with its output when it failed."""
    start = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the run failed with status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return time.monotonic() - start


def run_and_kill(argv: list[str], environment: dict[str, str], delay: float) -> bool:
    """Starts the run and kills it after `delay` seconds, with everything it started; False when it had ended by then."""
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(delay)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


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


def check(
    config: str, steps: int, kills: int, overrides: list[str], seed: int, environment: dict[str, str] | None = None, say=print,
    startup: float = 0.0,
) -> list[str]:  # fmt: skip
    """Runs once unbroken and once with `kills` kills, and returns what differs.

    A kill comes at a moment that is drawn uniformly from the time between `startup` seconds and the end of a run.
    """
    environment = dict(os.environ) if environment is None else environment
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        seconds = run_to_end(command(config, whole, steps, overrides), environment)
        say(f"unbroken run: {seconds:.1f} s")
        expected = fingerprint(whole)
        done = 0
        for attempt in range(20 * kills):
            delay = dice.uniform(startup, seconds)
            if run_and_kill(command(config, broken, steps, overrides), environment, delay):
                done += 1
                found = sorted(path.name for path in (broken / "checkpoints").glob("*step_*"))
                say(f"kill {done} of {kills} after {delay:.2f} s; checkpoints: {', '.join(found) or 'none'}")
            else:  # it was through: begin anew, so that kills meet a run at work
                problems = differences(expected, fingerprint(broken))
                if problems:
                    return problems
                broken = broken.with_name(f"broken_{attempt}")
            if done == kills:
                break
        run_to_end(command(config, broken, steps, overrides), environment)
        return differences(expected, fingerprint(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--startup", type=float, default=0.0, help="no kill within this many seconds of a start")
    arguments, overrides = parser.parse_known_args()
    problems = check(arguments.config, arguments.steps, arguments.kills, overrides, arguments.seed, startup=arguments.startup)
    print("equal by SHA-256: weights, optimizer, data position, state, metrics, rollouts" if not problems else f"DIFFERENT: {', '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
