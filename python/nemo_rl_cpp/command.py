"""The entry of the command `nemo-rl-cpp` and of the scripts in examples/. It imports next to nothing, so that Ctrl-C is heard while
the rest is imported."""

import os
from _signal import SIGINT, signal  # what the module `signal` wraps: its enumerations take time to make


def _leave(number: int, frame: object) -> None:
    """Ends the program at once. An exception might get lost in an import, or would be printed with a traceback."""
    os.write(2, b"\ninterrupted: stopped at once\n")
    os._exit(130)


def run(module: str) -> int:
    """Runs `main` of this module of the package, whose `interrupts.startup` hears Ctrl-C from then on; the exit status."""
    signal(SIGINT, _leave)
    from importlib import import_module

    return import_module(f"nemo_rl_cpp.{module}").main()


def main() -> int:
    """The command `nemo-rl-cpp`."""
    return run("cli")
