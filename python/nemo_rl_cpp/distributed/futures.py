"""Results of calls that run beside the caller: what `.remote(...)` gives and `get` waits for."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_rl_cpp.errors import as_user_error

_SLICE = 0.5  # seconds of one wait: Python looks at signals between them, also at one that another thread was woken for


class Answer(NamedTuple):
    """How a call ended: with a value, or with an error, its traceback as text, and the sentence about it where it arose in the
    user's code."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    told: str | None = None


class Future:
    """The result of a call that may still be running."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: object = None
        self._error: BaseException | None = None

    @classmethod
    def completed(cls, value: object) -> "Future":
        """A future that holds `value` already."""
        future = cls()
        future._value = value
        future._done.set()
        return future

    def run(self, call: Callable[[], object]) -> None:
        """Makes the call and keeps its value, or the exception it raised."""
        try:
            self._value = call()
        except BaseException as error:  # whatever it is, it belongs to the one who asks for the result
            self._error = error
        self._done.set()

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Ends the call from outside: with a value, or with the error that it raised."""
        self._value, self._error = value, error
        self._done.set()

    @property
    def error(self) -> BaseException | None:
        """What the call raised; None while it runs and where it did not fail."""
        return self._error

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the value; raises what the call raised, or TimeoutError after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done.wait(_SLICE if end is None else min(_SLICE, end - time.monotonic())):
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no result after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value


def is_done(result: object) -> bool:
    """Whether what `.remote(...)` gave has ended: a future, or a reference of Ray's."""
    if isinstance(result, Future):
        return result.done()
    ray = sys.modules.get("ray")
    return ray is None or not isinstance(result, ray.ObjectRef) or bool(ray.wait([result], timeout=0)[0])


def as_raised(error: BaseException) -> BaseException:
    """What was raised in a Ray actor, without Ray's wrapping: with the sentence about the user's code (`told`) where it arose
    there, and its own traceback as a note. Any other exception as it is."""
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
    """The value behind a future; of a list of them, the list of values; anything else as it is.

    Ray's object references are resolved too, where Ray is in use; what was raised there is raised here.
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
