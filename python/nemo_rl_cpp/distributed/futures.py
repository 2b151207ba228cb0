"""Results of calls that run concurrently with the caller. `.remote(...)` returns them, and `get` waits for them."""

import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_rl_cpp.errors import as_user_error

_SLICE = 0.5  # seconds per wait: between waits Python handles signals, even those that another thread received


class Answer(NamedTuple):
    """The outcome of a worker's call: a value, or an error with its traceback as text. If user code raised the error,
    `told` is the sentence to show the user.
    """

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    told: str | None = None


class Future:
    """The result of a call that may still be running.

    Attributes:
        error: the exception that the call raised; None while it runs, or if it succeeded.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: object = None
        self.error: BaseException | None = None

    def run(self, call: Callable[[], object]) -> None:
        """Run `call`, and store its value or the exception that it raised."""
        try:
            self._value = call()
        except BaseException as error:  # any exception is raised for the caller of `result`
            self.error = error
        self._done.set()

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Set the outcome of the call: its value, or its error."""
        self._value, self.error = value, error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`, and return whether the call has ended."""
        return self._done.wait(seconds)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it. Raise the call's exception, or TimeoutError after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done.wait(_SLICE if end is None else min(_SLICE, end - time.monotonic())):
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no result after {timeout} s")
        if self.error is not None:
            raise self.error
        return self._value


def is_done(result: object) -> bool:
    """Return whether the result of `.remote(...)`, a Future or a Ray ObjectRef, is available."""
    if isinstance(result, Future):
        return result.done()
    ray = sys.modules.get("ray")
    return ray is None or not isinstance(result, ray.ObjectRef) or bool(ray.wait([result], timeout=0)[0])


def as_raised(error: BaseException) -> BaseException:
    """Return the exception that a Ray actor raised, without Ray's wrapper and with its traceback as a note. If user
    code raised it, its message is the actor's sentence for the user. Return an exception that is not from an actor
    unchanged.
    """
    ray = sys.modules.get("ray")
    if ray is None or not isinstance(error, ray.exceptions.RayTaskError):
        return error
    cause = error.cause
    if isinstance(cause, ray.exceptions.RayTaskError):
        return as_raised(cause)
    told, trace = getattr(cause, "told", None), getattr(cause, "trace", None)
    raised = cause if told is None else as_user_error(cause, told)
    raised.add_note(f"raised in an actor:\n{trace or vars(error).get('traceback_str', '')}")
    return raised


def get(result: object, timeout: float | None = None) -> Any:
    """Wait for a Future, a Ray ObjectRef, or a list of them, and return the values. Return any other object
    unchanged.
    """
    if isinstance(result, Future):
        return result.result(timeout)
    if isinstance(result, list):
        return [get(item, timeout) for item in result]
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(result, ray.ObjectRef):
        try:
            return ray.get(result, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise as_raised(error) from None
    return result


def picklable(error: BaseException) -> BaseException:
    """Return the exception, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
