"""Calls that the workers of a cluster run together. If one fails, this module decides which error is raised, and stops
the workers that wait for it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from nemo_rl_cpp.distributed.futures import Answer, Future
from nemo_rl_cpp.errors import RAISED_ON, as_user_error

_SLICE = 0.5  # seconds per wait; Python handles signals between waits
GRACE_SECONDS = 5.0  # for the cause to arrive, if a rank reports only that another rank failed

Listener = tuple[str, Callable[..., None]]
"""(Name of a callback argument, function that runs in the caller's thread when the worker calls this argument)."""


class WorkerLostError(RuntimeError):
    """Raised if a worker has ended or does not respond. The message says which worker, and what its current call is."""


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
        """Pass the events that the call has reported so far to `on_event`, in the current thread."""
        while self.events:
            self.on_event(*self.events.pop(0))

    def end(self, answer: Answer) -> None:
        """Store the outcome of the call. An error gets a note with the rank and the worker's traceback."""
        error = answer.error
        if error is not None:
            error = error if answer.told is None else as_user_error(error, answer.told)
            error.add_note(f"{RAISED_ON} {self.who}:\n{answer.trace}")
        self.set(answer.value, error)


class Workers(Protocol):
    """The workers of a cluster, however they are started.

    Attributes:
        tells_events: whether a call can report events while it runs.
        host: the address at which workers, even of another cluster, reach this process.
    """

    tells_events: bool
    host: str

    def __len__(self) -> int: ...

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start a call of `method` of object number `target` on a rank, with a pickled (args, kwargs)."""

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """Return the results of `calls`, which the ranks run together, in the same order.

        If a rank failed, raise its error, with its traceback as a note. If other ranks would wait for the failed rank,
        or a worker is lost (WorkerLostError), first kill all workers.
        """

    def kill(self) -> None:
        """Kill all workers. Idempotent."""


def _depth(error: BaseException) -> int:
    """Return how far an error is from the root cause: 0 for a lost worker, 1 for a rank's own failure, 2 if the rank
    stopped because another rank failed.
    """
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.distributed.ranks import OtherRankFailedError

    if isinstance(error, WorkerLostError):
        return 0
    return 2 if isinstance(error, (OtherRankFailedError, C.PeerLost, C.TimedOut, C.PeerRefused)) else 1


class Patience:
    """A time limit for the workers' other calls once one call has failed. They have `GRACE_SECONDS` to report the
    cause; then those that still wait for the failed rank are abandoned. If a worker is lost, waiting ends at once.
    """

    def __init__(self, calls: Sequence[WorkerCall]) -> None:
        self._calls = calls
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Return whether to stop waiting for the calls. Must be called repeatedly while they run."""
        errors = [call.error for call in self._calls if call.error is not None]
        if errors and self._failed_at is None:
            self._failed_at = time.monotonic()
        lost = any(isinstance(error, WorkerLostError) for error in errors)
        return lost or (bool(errors) and time.monotonic() - self._failed_at > GRACE_SECONDS)


def values_of(calls: Sequence[WorkerCall], workers: Workers) -> list:
    """Return the values of the calls once waiting for them is over, or raise the error closest to the root cause. First
    kill the workers if they cannot continue.
    """
    if error := min((call.error for call in calls if call.error is not None), key=_depth, default=None):
        if isinstance(error, WorkerLostError) or not all(call.done() for call in calls):
            workers.kill()
        raise error
    return [call.result() for call in calls]


def wait_together(*clusters: tuple[Workers, Sequence[WorkerCall]]) -> list[list]:
    """Return, for each cluster, the results of its calls, in which workers of several clusters wait for each other.

    Raise the error closest to the root cause. If the calls of one cluster fail, those of the others have a grace
    period; workers that still wait after it are killed.
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
