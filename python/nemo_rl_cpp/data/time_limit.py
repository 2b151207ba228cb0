"""A time limit for code of strangers that runs in this process, on any thread."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator


class _Interrupted(BaseException):
    """Raised in the limited thread; no `except Exception` of the code inside can hold it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError when the block takes longer than `seconds`.

    Python code is interrupted between two of its instructions; a single call into C is not, so whoever runs strangers'
    code must also keep it from calls without end.
    """
    thread = threading.get_ident()
    lock = threading.Lock()
    state = {"over": False, "sent": False}

    def interrupt() -> None:
        with lock:
            if not state["over"]:
                state["sent"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interrupted))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        except _Interrupted:
            raise
        except BaseException:
            _end(timer, lock, state)
            raise
        else:
            _end(timer, lock, state)
    except _Interrupted:
        raise TimeoutError(f"it took longer than {seconds:g} s") from None


def _end(timer: threading.Timer, lock: threading.Lock, state: dict[str, bool]) -> None:
    """Calls the interruption off. One that was sent as the block ended arrives in here, and nowhere later."""
    with lock:
        state["over"] = True
    timer.cancel()
    while state["sent"]:
        time.sleep(0.001)
