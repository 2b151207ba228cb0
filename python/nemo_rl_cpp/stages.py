"""What a command is doing before its first step, a line each, for whoever waits at a terminal."""

import time

_began: float | None = None


def show_stages() -> None:
    """From here on `stage` prints, with the seconds since now: a command line asks for it."""
    global _began
    _began = time.monotonic()


def stage(text: str) -> None:
    """Says what begins now; nothing where no command line asked for it."""
    if _began is not None:
        print(f"[{time.monotonic() - _began:5.1f} s] {text}", flush=True)
