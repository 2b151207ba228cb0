"""Calls that run concurrently with the caller. `get` waits for the results of `.remote(...)`. If one of several workers
that run a call together fails, this module decides which error is raised and which workers are stopped."""

import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from nemo_rl_cpp.errors import RAISED_ON, as_user_error

WAIT_SECONDS = 0.5  # length of one wait: between waits Python handles signals, even those that another thread received
GRACE_SECONDS = 5.0  # for the cause to arrive, if a rank reports only that another rank failed

Listener = tuple[str, Callable[..., None]]
"""(Name of an argument that is a callback, function that the caller's thread runs when the worker calls it)."""


class WorkerLostError(RuntimeError):
    """Raised if a worker has ended or does not respond. The message names the worker and its current call."""


class OtherRankFailedError(RuntimeError):
    """Raised if this rank stops because another rank failed. The error of the failed rank says why."""


class Answer(NamedTuple):
    """A worker's answer to a call: the value, or the error with its traceback `trace`. If code of the user raised the
    error, `told` is the sentence to show to the user."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    told: str | None = None


class Future:
    """The result of a call that may still be running. `error` is the exception that the call raised, or None. `done()`
    returns whether the call has ended; `wait(seconds)` waits up to that time, and returns the same."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: object = None
        self.error: BaseException | None = None
        self.done, self.wait = self._done.is_set, self._done.wait

    def run(self, call: Callable[[], object]) -> None:
        """Run `call`, and store its value or the exception that it raised."""
        try:
            self.set(call())
        except BaseException as error:  # any exception is raised for the caller of `result`
            self.set(None, error)

    def set(self, value: object, error: BaseException | None = None) -> None:
        self._value, self.error = value, error
        self._done.set()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it. Raise the call's exception, or TimeoutError after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done.wait(WAIT_SECONDS if end is None else min(WAIT_SECONDS, end - time.monotonic())):
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
    """Return the exception that a Ray actor raised, without Ray's wrapper, with the actor's traceback as a note. If the
    user's code raised it, replace the message by the sentence that the actor wrote for the user. Return other
    exceptions unchanged."""
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
    """Return the value of a Future or a Ray ObjectRef, the values of a list of these, or any other object unchanged.
    Raise TimeoutError after `timeout` seconds."""
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
    """Return `error`, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class WorkerCall(Future):
    """A call in progress on the worker of one rank. `role` is the word for the worker in messages, such as "rank"."""

    def __init__(
        self, rank: int, size: int, what: str, on_event: Callable[..., None] | None = None, role: str = "rank"
    ) -> None:
        super().__init__()
        self.rank, self.size, self.what, self.on_event = rank, size, what, on_event
        self.who = f"{role} {rank} of {size}"
        self.events: list[tuple] = []

    def tell_events(self) -> None:
        """Call `on_event` in the current thread with each event that the worker has reported so far."""
        while self.events:
            self.on_event(*self.events.pop(0))

    def end(self, answer: Answer) -> None:
        """Store the call's outcome `answer`; to an error add a note with the rank and the worker's traceback."""
        error = answer.error
        if error is not None:
            error = error if answer.told is None else as_user_error(error, answer.told)
            error.add_note(f"{RAISED_ON} {self.who}:\n{answer.trace}")
        self.set(answer.value, error)


class Workers(Protocol):
    """The interface of a cluster's workers, independent of how they are started. `tells_events`: whether a call can
    report events while it runs. `host`: the address at which workers, even of another cluster, reach this process."""

    tells_events: bool
    host: str

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start and return a call of `method` of object `target` on rank `rank`. `payload`: pickled (args, kwargs)."""

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """Wait for `calls`, which the ranks run together, and return their results in the same order.

        If a rank failed, raise its error. If other ranks would wait for it, or a worker is lost (WorkerLostError),
        first kill all workers."""

    def kill(self) -> None:
        """Kill all workers. Further calls do nothing."""


def _depth(error: BaseException) -> int:
    """Return an error's distance from the root cause: 0 a lost worker, 1 a rank's failure, 2 a consequence of it."""
    from nemo_rl_cpp._native import C

    if isinstance(error, WorkerLostError):
        return 0
    return 2 if isinstance(error, (OtherRankFailedError, C.PeerLost, C.TimedOut, C.PeerRefused)) else 1


@dataclass
class Patience:
    """A time limit for the calls that still run after one of `calls` has failed: `periods` times `GRACE_SECONDS`, in
    which their workers may report the root cause. If a worker is lost, waiting ends at once."""

    calls: Sequence[Future]
    periods: int = 1
    _failed_at: float | None = None

    def is_over(self) -> bool:
        """Return whether to stop waiting for the calls. Call this method repeatedly while the calls run."""
        errors = [call.error for call in self.calls if call.error is not None]
        if errors and self._failed_at is None:
            self._failed_at = time.monotonic()
        lost = any(isinstance(error, WorkerLostError) for error in errors)
        return lost or (bool(errors) and time.monotonic() - self._failed_at > self.periods * GRACE_SECONDS)


def values_of(calls: Sequence[WorkerCall], workers: Workers) -> list:
    """Return the values of `calls`. If any failed, raise the error closest to the root cause; if a worker is lost or a
    call has not ended, kill the workers first."""
    if error := min((call.error for call in calls if call.error is not None), key=_depth, default=None):
        if isinstance(error, WorkerLostError) or not all(call.done() for call in calls):
            workers.kill()
        raise error
    return [call.result() for call in calls]


def wait_together(*clusters: tuple[Workers, Sequence[WorkerCall]]) -> list[list]:
    """Wait for calls in which workers of different clusters need each other. `clusters` are pairs (workers, their
    calls). Return a list of results for each.

    Raise the error closest to the root cause. After the calls of one cluster have failed, those of the others have
    twice the grace period to end; then their workers are killed."""
    waits = [Future() for _ in clusters]
    for wait, (workers, calls) in zip(waits, clusters):
        threading.Thread(target=wait.run, args=(partial(workers.wait, calls),), daemon=True).start()
    patience = Patience(waits, periods=2)
    while (running := [wait for wait in waits if not wait.done()]) and not patience.is_over():
        running[0].wait(WAIT_SECONDS)
    if errors := [wait.error for wait in waits if wait.error is not None]:
        for wait, (workers, _) in zip(waits, clusters):
            if not wait.done():
                workers.kill()
        raise min(errors, key=_depth)
    return [wait.result() for wait in waits]
