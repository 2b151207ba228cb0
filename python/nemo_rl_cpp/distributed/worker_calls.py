"""Calls that the workers of a cluster make together: which error is raised, and how the other workers stop waiting."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from nemo_rl_cpp.distributed.futures import Answer, Future
from nemo_rl_cpp.errors import RAISED_ON, as_user_error

_SLICE = 0.5  # seconds per wait; Python handles signals between waits
GRACE_SECONDS = 5.0  # for the cause to arrive, if a rank only reports that a different rank failed

Listener = tuple[str, Callable[..., None]]
"""(Name of an argument of a call, function called in the caller's thread when the call calls that argument)."""


class WorkerLostError(RuntimeError):
    """A worker has ended or is unresponsive; the message names the worker and its current call."""


class WorkerCall(Future):
    """A call in progress on the worker of one rank; `role` names the worker in messages."""

    def __init__(
        self, rank: int, size: int, what: str, on_event: Callable[..., None] | None = None, role: str = "rank"
    ) -> None:
        super().__init__()
        self.rank, self.size, self.what, self.on_event = rank, size, what, on_event
        self.who = f"{role} {rank} of {size}"
        self.events: list[tuple] = []

    def tell_events(self) -> None:
        """Deliver the events the call has reported so far, on the caller's thread."""
        while self.events:
            self.on_event(*self.events.pop(0))

    def end(self, answer: Answer) -> None:
        """Store the worker's result; an error gets the rank and the worker's traceback as a note."""
        error = answer.error
        if error is not None:
            error = error if answer.told is None else as_user_error(error, answer.told)
            error.add_note(f"{RAISED_ON} {self.who}:\n{answer.trace}")
        self.set(answer.value, error)


class Workers(Protocol):
    """The workers of a cluster, however they were started.

    Attributes:
        tells_events: whether a call can report events while it runs.
        host: address at which workers, also of a different cluster, reach this process.
    """

    tells_events: bool
    host: str

    def __len__(self) -> int: ...

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start a call of `method` of the object number `target`, with a pickled (args, kwargs)."""

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """Return the results of calls that the ranks make together.

        Raise the error of the rank that failed, with its traceback as a note. If any rank would wait for the failed
        rank, or if a worker is lost (WorkerLostError), all workers are killed first.
        """

    def kill(self) -> None:
        """Kill all workers. Idempotent."""


def _depth(error: BaseException) -> int:
    """Return an error's distance from the cause: 0 a lost worker, 1 a rank's own failure, 2 a peer's failure."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.distributed.ranks import OtherRankFailedError

    if isinstance(error, WorkerLostError):
        return 0
    return 2 if isinstance(error, (OtherRankFailedError, C.PeerLost, C.TimedOut, C.PeerRefused)) else 1


class Patience:
    """Decides how long to wait for calls once a call has failed. Other calls have `GRACE_SECONDS` to report the cause;
    calls that still wait for the failed rank are then abandoned. If a worker is lost, waiting ends at once."""

    def __init__(self, calls: Sequence[WorkerCall]) -> None:
        self._calls = calls
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Return whether to stop waiting. Call it repeatedly while the calls run."""
        errors = [call.error for call in self._calls if call.error is not None]
        if errors and self._failed_at is None:
            self._failed_at = time.monotonic()
        lost = any(isinstance(error, WorkerLostError) for error in errors)
        return lost or (bool(errors) and time.monotonic() - self._failed_at > GRACE_SECONDS)


def values_of(calls: Sequence[WorkerCall], workers: Workers) -> list:
    """Return or raise what `Workers.wait` does after waiting; kill the workers if they cannot continue."""
    if error := min((call.error for call in calls if call.error is not None), key=_depth, default=None):
        if isinstance(error, WorkerLostError) or not all(call.done() for call in calls):
            workers.kill()
        raise error
    return [call.result() for call in calls]


def wait_together(*clusters: tuple[Workers, Sequence[WorkerCall]]) -> list[list]:
    """Return the results, by cluster, of calls in which workers of several clusters wait for each other.

    Raise the error closest to the cause. If the calls of one cluster have failed, the calls of the other clusters have
    a grace period to end; workers that still wait are then killed.
    """
    waits = [(Future(), workers) for workers, _ in clusters]
    for (wait, workers), (_, calls) in zip(waits, clusters):
        threading.Thread(target=wait.run, args=(partial(workers.wait, calls),), daemon=True).start()
    failed_at: float | None = None
    while running := [wait for wait, _ in waits if not wait.done()]:
        running[0].wait(_SLICE)
        if failed_at is None and any(wait.error is not None for wait, _ in waits):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > 2 * GRACE_SECONDS:
            break
    errors = [wait.error for wait, _ in waits if wait.error is not None]
    if errors:
        for wait, workers in waits:
            if not wait.done():
                workers.kill()
        raise min(errors, key=_depth)
    return [wait.result() for wait, _ in waits]
