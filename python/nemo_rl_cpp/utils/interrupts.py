"""Ctrl-C, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 (a scheduler's warning) end a run at a step boundary, with a
checkpoint; a second one ends it at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class GracefulStop:
    """While entered, the first of `signals` only sets `requested`; the loop looks at it between steps.

        with GracefulStop() as stop:
            while not state.finished:
                ...
                if stop.requested:
                    state.stop(stop.reason)

    The second SIGINT raises KeyboardInterrupt where the program is, the second SIGTERM SystemExit(143); a third signal
    kills the process, even inside a long native call. Handlers are restored on exit. Outside the main thread, where
    Python allows no handlers, it does nothing.
    """

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, announce: Any = None) -> None:
        """`announce(text)` shows the message on the first signal; by default it goes to stderr."""
        self._announce = announce
        self._previous: dict[int, Any] = {}
        self._count = 0
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        """Whether the run was asked to end."""
        return self.reason is not None

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            # what the caller ignores stays ignored: a run under nohup outlives its terminal
            heard = [number for number in self.signals if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._count == 1:
            self.reason = "interrupted" if number == signal.SIGINT else "terminated"
            self._say(f"{name}: the run ends after this step, with a checkpoint; once more to stop at once")
            return
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _say(self, text: str) -> None:
        if self._announce is not None:
            self._announce(text)
        else:
            # os.write: safe in a signal handler, where a buffered write might be re-entered
            os.write(2, f"\n{text}\n".encode())
