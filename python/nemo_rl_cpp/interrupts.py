"""Signal handling. Before the first step a signal ends the program. During a run, Ctrl-C, SIGTERM, SIGHUP (a closed
terminal) and SIGUSR1 (a scheduler's warning) end it after the step, with a checkpoint; a second signal at once."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_SECONDS = 3.0
"""Seconds that an ending program has for cleanup before it is killed."""


class Ended(SystemExit):
    """Raised if a signal other than SIGINT ended the program. `code` is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal_name = signal.Signals(number).name


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def say(text: str) -> None:
    """Print a line to stderr, unbuffered, so that a signal handler may call it during another write."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"\n{text}\n".encode())


def end_soon(status: int, done: threading.Event | None = None, text: str | None = None) -> None:
    """Print `text` and end the process with `status` after GRACE_SECONDS, unless `done` is set by then. This works even
    if another thread does not end, or if the main thread hangs in a call."""
    done = done or threading.Event()

    def watch() -> None:
        if not done.wait(GRACE_SECONDS):
            if text is not None:
                say(text)
            os._exit(status)

    threading.Thread(target=watch, daemon=True, name="end_soon").start()


def _in_an_import(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def startup() -> Iterator[None]:
    """A context manager that makes Ctrl-C raise KeyboardInterrupt, until a `GracefulStop` is entered. During an import,
    Ctrl-C instead prints a line and ends the process with status 130, because importing torch would lose the exception.
    A forked process prints no line."""
    if not _in_main_thread():
        yield
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if not _in_an_import(frame):
            raise KeyboardInterrupt
        if os.getpid() == owner:
            say("interrupted: stopped at once")
        os._exit(130)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


def nobody_reads() -> bool:
    """Return whether standard output is a pipe that its reader, such as `head`, has closed."""
    try:
        out = select.poll()
        out.register(sys.stdout.fileno(), 0)  # poll always reports errors
        return any(event & select.POLLERR for _, event in out.poll(0))
    except (AttributeError, OSError, ValueError):  # stdout is missing, closed, or no file
        return False


class GracefulStop:
    """A context manager that makes the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 set `requested`, which the caller
    checks between steps.

        with GracefulStop() as stop:
            while not state.finished:
                ...
                if stop.requested:
                    state.stop(stop.reason)

    A second signal raises KeyboardInterrupt for SIGINT, otherwise SystemExit(128 + its number). If the block has not
    ended some seconds later (a call hangs, or the exception was caught), the process ends with the status 128 + that
    number. A third signal kills the process. If user code, such as a reward function, replaces a handler of this
    object, the handler is restored with a warning, after the call of user code or when `requested` is next read. SIGHUP
    and SIGUSR1 stay ignored if they already are, as under nohup. At the end of the block the previous handlers are
    restored. Outside the main thread, where Python allows no handlers, the context manager does nothing."""

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, announce: Callable[[str], None] | None = None, saves: bool = True) -> None:
        """Create the context manager. `announce(text)` shows the message for the first signal; None: print it to
        stderr. `saves`: whether the run saves a checkpoint at its end, for the message."""
        self._announce = announce
        self.saves = saves
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._count = 0
        self._ended = threading.Event()  # set on exit: the process need not be killed
        self._owner = os.getpid()
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to end."""
        self.put_back()
        return self.reason is not None

    def put_back(self) -> None:
        """Restore the handlers of this object for signals whose handlers other code, such as a reward function, has
        replaced; warn about it."""
        if not self._previous or self._count >= 2 or not _in_main_thread():
            return
        changed = [number for number in self._previous if signal.getsignal(number) != self._handle]
        for number in changed:
            signal.signal(number, self._handle)
        if changed:
            names = ", ".join(signal.Signals(number).name for number in changed)
            self._say(f"warning: code that the run called has changed what {names} does; it ends the run again")

    def __enter__(self) -> "GracefulStop":
        if _in_main_thread():
            # shells make background jobs ignore SIGINT
            asked = (signal.SIGINT, signal.SIGTERM)
            heard = [each for each in self.signals if each in asked or signal.getsignal(each) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in heard}
            _entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self in _entered:
            _entered.remove(self)
        self._ended.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._count:  # a closing terminal may send several
            return
        self._count += 1
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._count == 1:
            self.reason = "interrupted" if number == signal.SIGINT else "terminated"
            what = ", with a checkpoint" if self.saves else " and saves nothing, since checkpointing.enabled is false"
            self._say(f"{name}: the run ends after this step{what}; once more to stop at once")
            return
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        text = "interrupted" if number == signal.SIGINT else f"ended by {name}"
        end_soon(128 + number, self._ended, f"{text}: stopped at once")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Ended(number)

    def _say(self, text: str) -> None:
        if os.getpid() != self._owner:  # the parent process prints the message
            return
        if self._announce is not None:
            self._announce(text)
        else:
            say(text)


_entered: list[GracefulStop] = []


def restore_signal_handlers() -> None:
    """Restore the signal handlers of the innermost active `GracefulStop`, after code that may have replaced them."""
    for stop in _entered[-1:]:
        stop.put_back()


def _after_fork() -> None:
    """In a forked child, let SIGTERM end the process, as `Process.terminate` expects. The first Ctrl-C at the terminal
    reaches the child as well as its parent, but does not end the child, because the parent's current step may need the
    child."""
    for stop in _entered:
        before = stop._previous.pop(signal.SIGTERM, None)
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
