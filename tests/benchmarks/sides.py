"""Options and child processes of the benchmarks. It needs no packages, because peers run in separate environments."""

import argparse
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HIDDEN = {"help": argparse.SUPPRESS}
"""An option that the benchmark passes to its own processes."""


def options(description: str, **given: object) -> argparse.Namespace:
    """Read the options `given` from the command line. Each value is the default, whose type is the option's type (a
    list: several values; False: a switch), or a dictionary with the arguments of `add_argument`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in given.items():
        settings = {"type": type(value), "default": value}
        if isinstance(value, dict):
            settings = value
        elif isinstance(value, list):
            settings = {"type": type(value[0]), "nargs": "+", "default": value}
        elif value is False:
            settings = {"action": "store_true"}
        parser.add_argument(*{f"--{name.replace('_', '-')}": None, f"--{name}": None}, **settings)
    return parser.parse_args()


def choice(*choices: str) -> dict[str, object]:
    """Return the arguments of `add_argument` for one of `choices`. The first is the default."""
    return {"choices": choices, "default": choices[0]}


def choices(known: object, *default: str) -> dict[str, object]:
    """Return the arguments of `add_argument` for several of the strings `known`; without `default`, all of them."""
    return {"nargs": "+", "choices": list(known), "default": list(default or known)}


def memory_of(key: str) -> int:
    """Return the bytes of this process from /proc: VmRSS now, VmHWM at the peak (ru_maxrss would include the
    parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def in_new_process(work: Callable[..., Any], *arguments: object) -> Any:
    """Return `work(*arguments)`, computed in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


class Child:
    """A process that answers each line of its standard input with a line, both in JSON. It writes a line once it is
    ready."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.name, self.errors = name, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, cwd=folder
        )  # fmt: skip
        self.read()

    def read(self) -> object:
        """Return the next line that the process writes. Raise SystemExit with its errors if it ended."""
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise SystemExit(f"{self.name} ended with status {status}:\n{self.errors.read()[-3000:]}")
        return json.loads(line)

    def ask(self, what: object) -> object:
        """Send a line, and return the answer."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.errors.close()
