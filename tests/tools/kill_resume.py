"""Kills a run repeatedly at random moments, resumes it, and compares the result with that of an uninterrupted run.

    python tests/tools/kill_resume.py --kills 20
    python tests/tools/kill_resume.py --config configs/ppo_tiny.yaml --kills 20
    python tests/tools/kill_resume.py --config configs/grpo_arithmetic_smollm2.yaml --kills 3 --steps 6 grpo.max_val_samples=16

Weights, optimizer state, data position, training state, and the metrics of every step except times and memory must have
equal SHA-256 digests. The exit status is 1 if anything differs."""

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from forked_workers import Forked  # noqa: E402

TIMES = ("timing/", "performance/", "memory/", "train/refit/seconds", "train/refit/gb_per_s")


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
    """The seconds of an uninterrupted run: until the end of its first step, and the mean of the later steps."""

    first_step: float
    step: float


def run_to_end(argv: list[str], environment: dict[str, str]) -> Pace:
    """Run to the end, and return the pace. Raise RuntimeError with the output if the run fails."""
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
    """Start a run, and kill it with all its child processes `delay` seconds after the end of step `after_step` (0:
    after the start).

    Return False if the run had ended by then."""
    process = start(argv, environment)
    if after_step:
        for line in process.stdout:
            if (step_of(line) or 0) >= after_step:
                break
    try:
        process.wait(delay)
        return False
    except subprocess.TimeoutExpired:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # a forked run that has no process group yet, and so no children
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return True
    finally:
        process.stdout.close()


class ForkedRun(Forked):
    """A run in a forked child, with the part of `subprocess.Popen` that is used here."""

    def __init__(self, argv: list[str]) -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)
        sys.stdout.flush()
        super().__init__(os.fork())
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                os.close(reading)
                for stream in (1, 2):
                    os.dup2(writing, stream)
                sys.stdout = os.fdopen(1, "w", buffering=1)
                os.chdir(ROOT)
                status = importlib.import_module(argv[2]).main(argv[3:])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status or 0)
        os.close(writing)


FORK = False
IMPORTED = ("algorithms.build", "commands.runs", "models.policy.lm_policy", "run_grpo_math", "run_ppo")


def fork_runs() -> None:
    """Fork all later runs from this process, after importing what every run imports. The imports start no threads."""
    global FORK
    FORK = True
    for name in IMPORTED:
        importlib.import_module(f"nemo_rl_cpp.{name}")


def start(argv: list[str], environment: dict[str, str]) -> "subprocess.Popen | ForkedRun":
    if FORK:
        return ForkedRun(argv)
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def step_of(line: str) -> int | None:
    """Return the number of the finished step that a line of output reports, or None."""
    match = re.match(r"step (\d+)/", line)
    return int(match[1]) if match else None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digests of everything that must not depend on interruptions, by name."""
    checkpoint = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    prints = {
        str(path.relative_to(checkpoint)): sha256(path)
        for path in sorted(checkpoint.rglob("*"))
        # config.yaml and the manifest contain folder names of this run, training_info.json the log folder
        if path.is_file()
        and path.name not in ("config.yaml", "manifest.json", "training_info.json", "config_resolved.yaml")
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
    """Return the rows without the metrics that depend on time and memory."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]
    return [row for row in kept if set(row) != {"step"}]


def differences(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Return the names whose fingerprints differ or that only one of the two runs has."""
    return sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none."""
    return max((int(path.name.split("_")[1]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def check(
    config: str, steps: int, kills: int, overrides: list[str], seed: int, say: Callable[[str], None] = print
) -> list[str]:
    """Run once without interruptions and once with `kills` kills. Return what differs.

    Each kill comes at a random moment of the rest of the run: a random step, and a random time after its end. So kills
    occur during start-up, generation, training, logging and saving. After a run that reaches its end, the next one
    starts from scratch in another folder."""
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
            if run_and_kill(
                command(config, broken, steps, overrides), environment, 0 if after == begin else after, delay
            ):
                done += 1
                found = sorted(path.name for path in (broken / "checkpoints").glob("*step_*"))
                say(
                    f"kill {done} of {kills}: {delay:.2f} s after step {after}; on the disk: {', '.join(found) or 'no checkpoint'}"
                )
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
    equal = "equal by SHA-256: weights, optimizer, data position, state, metrics, rollouts"
    print(f"{arguments.kills} kills: {'DIFFERENT: ' + ', '.join(problems) if problems else equal}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
