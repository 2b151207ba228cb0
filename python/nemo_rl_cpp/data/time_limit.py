"""A time limit for code of strangers that runs in this process, on any thread."""

from __future__ import annotations

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
    state = {"over": False, "interrupted": False}

    def interrupt() -> None:
        with lock:
            if not state["over"]:
                state["interrupted"] = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interrupted))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                state["over"] = True
            timer.cancel()
            # An interruption that was sent as the block ended arrives here, and nowhere later.
            while state["interrupted"]:
                time.sleep(0.001)
    except _Interrupted:
        raise TimeoutError(f"it took longer than {seconds:g} s") from None
