"""Calls that the workers of a cluster make together: whose failure counts, and how the others stop waiting for it."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from nemo_rl_cpp.distributed.futures import Answer, Future
from nemo_rl_cpp.errors import RAISED_ON, as_user_error

_SLICE = 0.5  # seconds of one wait: Python looks at signals between them
GRACE_SECONDS = 5.0  # for the reason of a failure to come, where a rank says only that another has failed

Listener = tuple[str, Callable[..., None]]
"""The name of an argument of a call, and what is called here, in the caller's thread, when the call calls that argument."""


class WorkerLostError(RuntimeError):
    """A worker has ended or is silent; tells which one, and what it was doing."""


class WorkerCall(Future):
    """A call that the worker of one rank is making; `role` is what messages call it."""

    def __init__(
        self, rank: int, size: int, what: str, on_event: Callable[..., None] | None = None, role: str = "rank"
    ) -> None:
        super().__init__()
        self.rank, self.size, self.what, self.on_event = rank, size, what, on_event
        self.who = f"{role} {rank} of {size}"
        self.events: list[tuple] = []

    def tell_events(self) -> None:
        """Hand on what the call has told of so far, in the caller's thread."""
        while self.events:
            self.on_event(*self.events.pop(0))

    def end(self, answer: Answer) -> None:
        """Take the worker's answer; an error gets the rank and its traceback there as a note."""
        error = answer.error
        if error is not None:
            error = error if answer.told is None else as_user_error(error, answer.told)
            error.add_note(f"{RAISED_ON} {self.who}:\n{answer.trace}")
        self.set(answer.value, error)


class Workers(Protocol):
    """The workers of a cluster, however they were started.

    Attributes:
        tells_events: whether a call can tell of something while it runs.
        host: where workers, of this cluster or another, reach this process.
    """

    tells_events: bool
    host: str

    def __len__(self) -> int: ...

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start a call of `method` of the object number `target`, with a pickled (args, kwargs)."""

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """Return the values of calls that the ranks make together.

        Raise the error of the rank that failed, with its own traceback as a note. Where another rank would wait for the failed
        one, or where one is lost (WorkerLostError), all workers are ended first.
        """

    def kill(self) -> None:
        """End all workers. May be called again."""


def _depth(error: BaseException) -> int:
    """Return how far an error is from the reason of a failure: a lost worker, then a rank's own failure, then that of its peers."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.distributed.ranks import OtherRankFailedError

    if isinstance(error, WorkerLostError):
        return 0
    return 2 if isinstance(error, (OtherRankFailedError, C.PeerLost, C.TimedOut, C.PeerRefused)) else 1


class Patience:
    """How long calls are waited for once one of them has failed: the others may say why, for `GRACE_SECONDS`; those that go on
    waiting for the failed one are then given up. Where a worker is lost there is nothing to wait for."""

    def __init__(self, calls: Sequence[WorkerCall]) -> None:
        self._calls = calls
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Ask again and again while the calls run."""
        errors = [call.error for call in self._calls if call.error is not None]
        if errors and self._failed_at is None:
            self._failed_at = time.monotonic()
        lost = any(isinstance(error, WorkerLostError) for error in errors)
        return lost or (bool(errors) and time.monotonic() - self._failed_at > GRACE_SECONDS)


def values_of(calls: Sequence[WorkerCall], workers: Workers) -> list:
    """Return or raise what `Workers.wait` does when it waits no longer; workers that cannot go on are ended."""
    if error := min((call.error for call in calls if call.error is not None), key=_depth, default=None):
        if isinstance(error, WorkerLostError) or not all(call.done() for call in calls):
            workers.kill()
        raise error
    return [call.result() for call in calls]


def wait_together(*clusters: tuple[Workers, Sequence[WorkerCall]]) -> list[list]:
    """Return the values of calls in which workers of several clusters wait for one another, by cluster.

    Raise the error that is the others' reason. Where the calls of one cluster have failed, those of the others get their own
    grace to end; workers that still wait then are ended.
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
