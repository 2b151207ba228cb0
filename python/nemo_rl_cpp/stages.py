"""Print progress lines for the stages of a command before its first step."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_began: float | None = None
_PATIENCE = 2.0
"""Seconds that work must take before its progress is shown."""
_REDRAWN, _REPEATED = 0.5, 15.0
"""Seconds between two progress lines: in a terminal, which overwrites the line, and in a file."""


@contextmanager
def stages_shown() -> Iterator[None]:
    """A context manager in which `stage` prints its lines, each with the seconds since the `with` block began."""
    global _began
    _began = time.monotonic()
    try:
        yield
    finally:
        _began = None


def are_shown() -> bool:
    """Return whether the caller is inside `stages_shown`."""
    return _began is not None


def stage(text: str | None) -> None:
    """Print `text`, the name of a stage of work that begins now. Print nothing outside `stages_shown`, or for None."""
    if _began is not None and text is not None:
        print(f"[{time.monotonic() - _began:5.1f} s] {text}", flush=True)


@contextmanager
def work(text: str, total: float, always: bool = False) -> Iterator[Callable[[float], None]]:
    """A context manager that yields a function `advance(amount)`, which adds `amount` to the finished part of the
    amount of work `total`. Inside `stages_shown`, or if `always`, show progress on stderr after the name `text`, once
    the work takes more than a few seconds."""
    begin = last = time.monotonic()
    done, drawn = 0.0, False
    shown, terminal = always or _began is not None, getattr(sys.stderr, "isatty", bool)()

    def advance(amount: float) -> None:
        nonlocal done, last, drawn
        done += amount
        now = time.monotonic()
        if not shown or now - begin < _PATIENCE or (drawn and now - last < (_REDRAWN if terminal else _REPEATED)):
            return
        last, drawn = now, True
        line = f"{text}: {100 * min(done / total, 1.0) if total else 100:.0f} %, {now - begin:.0f} s"
        print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if drawn and terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
