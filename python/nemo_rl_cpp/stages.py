"""What a command is doing before its first step, a line each, for whoever waits at a terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_began: float | None = None


@contextmanager
def stages_shown() -> Iterator[None]:
    """While entered, `stage` prints, with the seconds since the entry: a command line asks for it."""
    global _began
    _began = time.monotonic()
    try:
        yield
    finally:
        _began = None


def stage(text: str) -> None:
    """Says what begins now; nothing where no command line asked for it."""
    if _began is not None:
        print(f"[{time.monotonic() - _began:5.1f} s] {text}", flush=True)
