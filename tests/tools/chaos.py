"""Kills or stops one process of a run in several processes at random moments, and looks at what the run does.

    python tests/tools/chaos.py --each 20
    python tests/tools/chaos.py --each 5 --victims "rank 1" --config configs/ppo_tiny.yaml
    python tests/tools/chaos.py --each 5 --victims environment
    python tests/tools/chaos.py --each 20 --side-by-side 2

Victims are rank 0, rank 1, the worker of an engine with weights of its own (with `--engines 0` there is none, and ranks generate), the
run's own process ("driver"), and an actor of an environment ("environment": such runs have the executor ray and no engine of its own);
each is killed (SIGKILL) or stopped (SIGSTOP; the driver for two seconds), in turns. An environment is only killed: the run waits for a
stopped one as long as for a slow one. Within the deadline the run must have ended with the name of the lost rank, or go on where the
driver was only stopped or an environment was lost that may be asked again; no process may be left; and the run that is resumed after
all of it must leave the same bits as an unbroken one. With `--side-by-side` the blows are dealt to so many chains, each with folders and an unbroken run of its own, since a run that waits for
a deadline leaves the processors to another. Exit status 1 if anything fails.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))
from kill_resume import command, differences, fingerprint, newest_step, run_to_end

VICTIMS = ("rank 0", "rank 1", "engine worker 0", "driver", "environment")
SILENCE = 4  # cluster.worker_timeout_s
LONGEST = 300.0  # seconds from the blow to the end of a run that goes on
DEADLINE = 30.0  # seconds from the blow to the end of the run: silence, grace for a reason, and the end of the program
WORKERS = (
    "cluster.executor=processes", "cluster.cpus_per_worker=1", f"cluster.worker_timeout_s={SILENCE}", "policy.gradient_blocks=2",
)  # fmt: skip


HAD_ENDED, NOT_THERE = "had ended", "was not there"  # no blow
STRETCH = {HAD_ENDED: 1 / 1.1, NOT_THERE: 1.1}
"""Of the next delay: a machine that becomes busier or idler has other times."""
BY_RAY = ("cluster.executor=ray", "cluster.gpus_per_node=2")


def sizes(engines: int) -> tuple[str, ...]:
    """Two trainers, and so many engines with weights of their own."""
    resources = f"policy.generation.colocated.resources.gpus_per_node={engines}"
    apart = ("policy.generation.colocated.enabled=false", resources) if engines else ()
    return (f"cluster.gpus_per_node={2 + engines}", *apart)


def workers_of(pid: int) -> dict[str, int]:
    """The workers of a run: "rank 0", "engine worker 0" -> process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and "nemo_rl_cpp.distributed.worker" in words:
                found[f"{words[-3]} {json.loads(words[-2])['rank']}"] = int(entry.name)
    return found


def actors_of(pid: int) -> dict[str, int]:
    """Actors of environments among the processes that a run has started, all of them below its Ray: "environment" -> the first.
    Ray names a process by its actor's class."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents[int(entry.name)] = (parent, (entry / "cmdline").read_bytes())
    found = {}
    for number, (_, words) in sorted(parents.items()):
        if words.startswith(b"ray::EnvironmentActor"):
            above = number
            while above in parents and above != pid:
                above = parents[above][0]
            if above == pid:
                found.setdefault("environment", number)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before or while it is read
        return False


def blow(argv: list[str], victim: str, number: signal.Signals, delay: float) -> tuple[str, list[str]]:
    """Starts the run and strikes after `delay` seconds; (what happened, what is wrong about it)."""
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            run.wait(delay)
            return HAD_ENDED, []
        except subprocess.TimeoutExpired:
            pass
        workers = workers_of(run.pid) | actors_of(run.pid)
        target = run.pid if victim == "driver" else workers.get(victim)
        if target is None:  # it has not been started, or has ended
            run.kill(), run.wait()
            return NOT_THERE, []
        began = time.monotonic()
        os.kill(target, number)
        if target == run.pid and number == signal.SIGSTOP:
            time.sleep(2)
            os.kill(target, signal.SIGCONT)
            return went_on(run, output)
        if victim == "environment":
            return went_on(run, output)
        problems = []
        try:
            run.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            problems.append(f"the run had not ended after {DEADLINE:.0f} s")
            run.kill()
            run.wait()
        ended = time.monotonic() - began
        while any(map(alive, workers.values())) and time.monotonic() - began < ended + 5:
            time.sleep(0.05)
        problems += [f"{name} (process {pid}) is left" for name, pid in workers.items() if alive(pid)]
        output.seek(0)
        text = output.read()
        if victim != "driver" and f"{victim} of " not in text and run.returncode != 0:
            problems.append(f"the output does not name it: {text[-600:]}")
        return f"ended after {ended:.1f} s with status {run.returncode}", problems


def went_on(run: subprocess.Popen, output: TextIO) -> tuple[str, list[str]]:
    """What a run does that must not end because of what happened; `output` is what it prints."""
    try:
        status = run.wait(LONGEST)
    except subprocess.TimeoutExpired:
        run.kill(), run.wait()
        return "hangs", [f"the run had not ended after {LONGEST:.0f} s"]
    if status == 0:
        return "went on", []
    output.seek(0)
    return "did not go on", [f"status {status}: {output.read()[-1500:]}"]


@dataclass
class Chain:
    """Blows one after the other, each of which meets what the last one has left."""

    config: str
    steps: int
    overrides: list[str]
    number: int
    seed: int

    def command(self, folder: Path) -> list[str]:
        return command(self.config, folder, self.steps, self.overrides)

    def say(self, text: str) -> None:
        print(f"[{self.number}] {text}", flush=True)

    def strike(self, victims: list[tuple[str, signal.Signals]]) -> int:
        """How many blows, or ends, were wrong."""
        dice, failed = random.Random(self.seed + self.number), 0
        with tempfile.TemporaryDirectory() as scratch:
            whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
            began = time.monotonic()
            run_to_end(self.command(whole), dict(os.environ))
            length, expected, stretch = time.monotonic() - began, fingerprint(whole), 1.0
            for victim, number in victims:
                happened = None
                while happened in (None, *STRETCH):  # a resumed run is shorter: no blow then, and another try
                    stretch *= STRETCH.get(happened, 1.0)
                    delay = dice.uniform(0.3, 0.9) * length * stretch
                    happened, problems = blow(self.command(broken), victim, number, delay)
                    failed += bool(problems)
                    self.say(f"{victim} {number.name} after {delay:.1f} s: {happened}{'; '.join(['', *problems])}")
                    if newest_step(broken) >= self.steps:
                        failed += self.differs(expected, broken)
                        broken = broken.with_name(f"{broken.name}_")
            run_to_end(self.command(broken), dict(os.environ))
            return failed + self.differs(expected, broken)

    def differs(self, expected: dict[str, str], folder: Path) -> int:
        """Says whether the run in `folder`, which has come to its end, left the bits of the unbroken one; 1 if not."""
        wrong = differences(expected, fingerprint(folder))
        self.say(f"DIFFERENT: {', '.join(wrong)}" if wrong else "at its end: the same bits as the unbroken run")
        return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--each", type=int, default=20, help="blows for each victim")
    parser.add_argument("--victims", nargs="+", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--engines", type=int, default=1, help="workers that only generate")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="so many runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    victims = [victim for victim in arguments.victims if arguments.engines or not victim.startswith("engine")]
    groups = (
        [victim for victim in victims if victim != "environment"],
        [victim for victim in victims if victim == "environment"],
    )
    failed = 0
    for several, executor in zip(groups, (sizes(arguments.engines), BY_RAY)):
        if several:
            failed += campaign(arguments, several, [*WORKERS, *executor, *overrides])
    return 1 if failed else 0


def campaign(arguments: argparse.Namespace, victims: list[str], overrides: list[str]) -> int:
    """Strikes these victims of one kind of run; how much was wrong."""
    blows = [
        (victim, signal.SIGSTOP if turn % 2 and victim != "environment" else signal.SIGKILL)
        for turn in range(arguments.each)
        for victim in victims
    ]
    chains = [
        Chain(arguments.config, arguments.steps, overrides, number, arguments.seed)
        for number in range(arguments.side_by_side)
    ]
    cut = [len(blows) * number // len(chains) for number in range(len(chains) + 1)]  # neighbours: both signals in each
    with ThreadPoolExecutor(len(chains)) as pool:
        wrong = pool.map(lambda chain: chain.strike(blows[cut[chain.number] : cut[chain.number + 1]]), chains)
        failed = sum(wrong)
    print(f"{', '.join(victims)}: {len(blows)} blows, {failed} failures", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
