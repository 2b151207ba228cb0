"""Times the first hour of a stranger: clone, environment, compilation, first step, end of the quickstart, the fast tests; and measures disk and memory.

    python tests/tools/from_nothing.py                             prints the table
    python tests/tools/from_nothing.py --write docs/installation.md     also puts it there, between its two marks
    python tests/tools/from_nothing.py --until step                ends after the first step
    python tests/tools/from_nothing.py --downloads here            packages come from this machine's uv cache, as far as it has them

Everything happens in a temporary folder of its own, uv's cache included. What speeds this machine's own builds up (compiler caches,
launchers, a built environment) is switched off. The commands are those of README.md. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- measured by tests/tools/from_nothing.py -->", "<!-- end of what was measured -->"
QUICKSTART = ["uv", "run", "examples/run_grpo_math.py", "--config", "configs/grpo_arithmetic_smollm2.yaml"]
ASK = ["uv", "run", "nemo-rl-cpp", "generate", "--model", "results/grpo_arithmetic_smollm2", "2 + 3 = 5\n4 + 1 = 5\n2 + 6 =", "--greedy", "--stop", "\n"]  # fmt: skip
TESTS = ["uv", "run", "pytest", "-q", "-n", "2", "-m", "not slow"]
STAGES = ("step", "quickstart", "tests")


@dataclass(frozen=True)
class Took:
    """One command: its seconds, the peak of its largest process in bytes, its last line, and the second at which a line came that was waited for."""

    seconds: float
    peak: int
    last: str
    moment: float | None = None


class Stranger:
    """A fresh folder and an environment variable set without this machine's helps; runs commands there and keeps what they printed."""

    def __init__(self, folder: Path, own_cache: bool) -> None:
        self.folder, self.tree, self.log = folder, folder / "nemo_rl_cpp", folder / "log.txt"
        helps = re.compile(r"(CMAKE_|CCACHE_|NEMO_RL_|PYTHON|VIRTUAL_ENV|CI$|UV_PROJECT|UV_NO_SYNC)")
        self.environment = {name: value for name, value in os.environ.items() if not helps.match(name)}
        self.environment |= {
            "CCACHE_DISABLE": "1", "NEMO_RL_CPP_CACHE": str(folder / "models"), "COLUMNS": "160", "PYTHONUNBUFFERED": "1"
        }  # fmt: skip
        if own_cache:
            self.environment["UV_CACHE_DIR"] = str(folder / "uv")

    def run(self, *command: str, waits_for: str | None = None) -> Took:
        """Runs a command in the clone (before there is one, beside it); SystemExit with its last lines where it fails."""
        shown = " ".join(command).replace("\n", r"\n")
        print(f"$ {shown}", flush=True)
        begin = time.monotonic()
        lines, moment = [], None
        process = subprocess.Popen(
            command, cwd=self.tree if self.tree.exists() else self.folder, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        with self.log.open("a") as log:
            for line in process.stdout:
                log.write(line)
                lines.append(line.strip())
                if waits_for is not None and moment is None and waits_for in line:
                    moment = time.monotonic() - begin
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = Took(
            time.monotonic() - begin, usage.ru_maxrss * 1024, next((x for x in reversed(lines) if x), ""), moment
        )
        print(f"  {took.seconds:.1f} s, {took.last[:150]}", flush=True)
        if process.returncode != 0:
            raise SystemExit("\n".join([*lines[-30:], f"{command[0]} ended with status {process.returncode}"]))
        return took


def size(path: Path) -> int:
    """Bytes on disk below a path; a file with several names there counts once."""
    seen, total, waiting = set(), 0, [path]
    while waiting:
        place = waiting.pop()
        if not place.exists():
            continue
        for entry in os.scandir(place):
            status = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def bytes_of(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def table(rows: list[tuple[str, str, str, str]]) -> str:
    """The table of a page: stage, time, time since the beginning, memory or disk."""
    head = ["| stage | time | since the beginning | largest process |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def replaced(text: str, measured: str) -> str:
    """A page with `measured` between its two marks; ValueError where it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} followed by {END}")
    return f"{head}{BEGIN}\n{measured}\n{END}{tail}"


def machine() -> str:
    """Processor and number of cores, in words."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{model[1] if model else os.uname().machine}, {os.cpu_count()} cores"


def walk(stranger: Stranger, source: str, until: str) -> str:
    """The whole walk; what was measured, in Markdown."""
    rows: list[tuple[str, str, str, str]] = []
    since = 0.0

    def row(name: str, took: Took, seconds: float | None = None, memory: bool = True) -> None:
        nonlocal since
        part = took.seconds if seconds is None else seconds
        since += part
        rows.append((name, duration(part), duration(since), bytes_of(took.peak) if memory else ""))

    row("`git clone`", stranger.run("git", "clone", "--quiet", source, str(stranger.tree)), memory=False)
    row("download and unpack the environment", stranger.run("uv", "sync", "--no-install-project"))
    row("compile the core", stranger.run("uv", "sync"))
    trained = stranger.run(*QUICKSTART, waits_for="step 1/")
    if trained.moment is None:
        raise SystemExit("the quickstart printed no line 'step 1/...'")
    row("quickstart, until the first step is done", trained, trained.moment, memory=False)
    if until != "step":
        row("quickstart, to its end", trained, trained.seconds - trained.moment)
        row("ask the trained model", stranger.run(*ASK))
    if until == "tests":
        took = stranger.run(*TESTS)
        row(f"the fast tests ({took.last.strip('= ')})", took)
    disk = [
        ("clone", size(stranger.tree / ".git") + _sources(stranger)), ("environment `.venv`", size(stranger.tree / ".venv")),
        ("build folder", size(stranger.tree / "build")), ("converted model", size(stranger.folder / "models")),
        ("the quickstart's checkpoints and logs", size(stranger.tree / "results") + size(stranger.tree / "logs")),
    ]  # fmt: skip
    lines = ["", "| on disk | |", "|---|---|", *(f"| {name} | {bytes_of(number)} |" for name, number in disk)]
    return "\n".join([f"Measured on {machine()}.", "", table(rows), *lines])


def _sources(stranger: Stranger) -> int:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=stranger.tree, capture_output=True, text=True, check=True)
    return sum((stranger.tree / name).stat().st_size for name in names.stdout.split("\0") if name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=str(ROOT), help="the repository to clone (default: this one)")
    parser.add_argument("--until", choices=STAGES, default="tests", help="the last stage (default: tests)")
    parser.add_argument(
        "--downloads", choices=("fresh", "here"), default="fresh", help="uv's cache: empty, or this machine's"
    )
    parser.add_argument("--write", type=Path, help="a page whose marked part is replaced by the table")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"warning: this machine is busy (load {load:.1f}): the times will be longer than they need be", flush=True
        )
    with tempfile.TemporaryDirectory(prefix="from_nothing_") as folder:
        measured = walk(Stranger(Path(folder), given.downloads == "fresh"), given.source, given.until)
    print(measured)
    if given.write is not None:
        given.write.write_text(replaced(given.write.read_text(), measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
