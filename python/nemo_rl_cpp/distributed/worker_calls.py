"""Calls that the workers of a cluster make together: whose failure counts, and that nobody waits for one that has failed."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from nemo_rl_cpp.distributed.futures import Answer, Future
from nemo_rl_cpp.errors import RAISED_ON, as_user_error

_SLICE = 0.5  # seconds of one wait: Python looks at signals between them
GRACE_SECONDS = 5.0  # for the reason of a failure to come, where a rank says only that another has failed


class WorkerLostError(RuntimeError):
    """A worker has ended or is silent; says which one, and what it was doing."""


class WorkerCall(Future):
    """A call that the worker of one rank is making; `role` says what messages call it."""

    def __init__(
        self, rank: int, size: int, what: str, on_event: Callable[..., None] | None = None, role: str = "rank"
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.size, self.what, self.on_event = rank, size, what, on_event
        self.who = f"{role} {rank} of {size}"
        self.events: list[tuple] = []

    def tell_events(self) -> None:
        """Hands on what the call has told of so far, in the caller's thread."""
        while self.events:
            self.on_event(*self.events.pop(0))

    def end(self, answer: Answer) -> None:
        """With the worker's answer; an error gets the rank and its traceback there as a note."""
        error = answer.error
        if error is not None:
            error = error if answer.told is None else as_user_error(error, answer.told)
            error.add_note(f"{RAISED_ON} {self.who}:\n{answer.trace}")
        self.set(answer.value, error)


class Workers(Protocol):
    """The workers of a cluster, however they were started."""

    tells_events: bool
    """Whether a call can tell of something while it runs."""
    host: str
    """Where workers, of this cluster or another, reach this process."""

    def __len__(self) -> int:
        """Number of ranks."""

    def call(
        self, rank: int, target: int, method: str, payload: bytes, event: str | None = None, on_event: Callable[..., None] | None = None
    ) -> WorkerCall:  # fmt: skip
        """Starts a call of `method` of the object number `target`, with a pickled (args, kwargs). What the call hands to its
        argument `event`, a callable, comes to `on_event`."""

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """The values of calls that the ranks make together.

        Raises the error of the rank that failed, with its own traceback as a note. Where another rank would wait for the failed
        one, or where one is lost (WorkerLostError), all workers are ended first.
        """

    def kill(self) -> None:
        """Ends all workers. May be called again."""


def _depth(error: BaseException) -> int:
    """How far an error is from the reason of a failure: a lost worker, then a rank's own failure, then that of its peers."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.distributed.ranks import OtherRankFailedError

    if isinstance(error, WorkerLostError):
        return 0
    return 2 if isinstance(error, (OtherRankFailedError, C.PeerLost, C.TimedOut, C.PeerRefused)) else 1


def reason(calls: Sequence[WorkerCall]) -> BaseException | None:
    """Of all errors the one that is the others' reason."""
    return min((call.error for call in calls if call.error is not None), key=_depth, default=None)


class Patience:
    """How long calls are waited for once one of them has failed: the others may say why, for `GRACE_SECONDS`; those that go on
    waiting for the failed one are then given up. Where a worker is lost there is nothing to wait for."""

    def __init__(self, calls: Sequence[WorkerCall]) -> None:
        self._calls = calls
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Asked again and again while the calls run."""
        errors = [call.error for call in self._calls if call.error is not None]
        if errors and self._failed_at is None:
            self._failed_at = time.monotonic()
        lost = any(isinstance(error, WorkerLostError) for error in errors)
        return lost or (bool(errors) and time.monotonic() - self._failed_at > GRACE_SECONDS)


def values_of(calls: Sequence[WorkerCall], workers: Workers) -> list:
    """What `Workers.wait` gives or raises when it waits no longer; workers that cannot go on are ended."""
    if error := reason(calls):
        if isinstance(error, WorkerLostError) or not all(call.done() for call in calls):
            workers.kill()
        raise error
    return [call.result() for call in calls]


class _Waiting(threading.Thread):
    """Waits for the calls of one cluster."""

    def __init__(self, workers: Workers, calls: Sequence[WorkerCall]) -> None:
        super().__init__(daemon=True)
        self.workers, self.calls = workers, calls
        self.values: list = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.values = self.workers.wait(self.calls)
        except BaseException as error:
            self.error = error


def wait_together(*clusters: tuple[Workers, Sequence[WorkerCall]]) -> list[list]:
    """The values of calls in which workers of several clusters wait for one another, by cluster.

    Raises the error that is the others' reason. Where the calls of one cluster have failed, those of the others get `GRACE_SECONDS`
    to end; workers that still wait then are ended.
    """
    waiting = [_Waiting(workers, calls) for workers, calls in clusters]
    for each in waiting:
        each.start()
    failed_at: float | None = None
    while running := [each for each in waiting if each.is_alive()]:
        running[0].join(_SLICE)
        if failed_at is None and any(each.error is not None for each in waiting):
            failed_at = time.monotonic()
        if (
            failed_at is not None and time.monotonic() - failed_at > 2 * GRACE_SECONDS
        ):  # their own wait has its grace too
            break
    failed = [each for each in waiting if each.error is not None]
    for each in waiting if failed else ():
        if each.is_alive():
            each.workers.kill()
    if failed:
        raise min((each.error for each in failed), key=_depth)
    return [each.values for each in waiting]
