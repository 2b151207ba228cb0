"""Workers in processes of their own on this machine, as the run's process sees them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

from nemo_rl_cpp.distributed.futures import Future

_SLICE = 0.5  # seconds of one wait: Python looks at signals between them
_GRACE_SECONDS = 5.0  # for the reason of a failure to come, where a rank says only that another has failed


class WorkerLostError(RuntimeError):
    """A worker process has ended or is silent; says which one, and what it was doing."""


class WorkerCall(Future):
    """A call that a worker is making."""

    def __init__(self, worker: ProcessWorker, what: str, on_event: Callable[..., None] | None) -> None:
        super().__init__()
        self.worker, self.what, self.on_event = worker, what, on_event
        self.events: list[tuple] = []

    def tell_events(self) -> None:
        """Hands on what the call has told of so far, in the caller's thread."""
        while self.events:
            self.on_event(*self.events.pop(0))


class ProcessWorker:
    """One process, started by exec in a session of its own, so that a Ctrl-C in the terminal reaches the run's process alone."""

    def __init__(self, join: dict, changed: threading.Condition) -> None:
        self.rank, self.size = join["rank"], join["size"]
        self._changed, self._pending, self._last_call = changed, {}, 0
        self.last_beat = time.monotonic()
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nemo_rl_cpp.distributed.worker", str(theirs.fileno()), json.dumps(join)],
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(join["threads"])},
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self.joined = self._expect(-1, "meeting the other ranks", None)
        threading.Thread(target=self._read, daemon=True, name=f"rank-{self.rank}").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(
        self, target: int, method: str, payload: bytes, event: str | None = None, on_event: Callable[..., None] | None = None
    ) -> WorkerCall:  # fmt: skip
        """Starts a call of `method` of the object number `target`, with a pickled (args, kwargs). What the call hands to its
        argument `event`, a callable, comes to `on_event`."""
        self._last_call += 1
        call = self._expect(self._last_call, method.strip("_"), on_event)
        with contextlib.suppress(OSError):  # it has died: the reader says so
            self._connection.send((self._last_call, target, method, payload, event))
        return call

    def _expect(self, number: int, what: str, on_event: Callable[..., None] | None) -> WorkerCall:
        call = WorkerCall(self, what, on_event)
        self._pending[number] = call
        return call

    def _read(self) -> None:
        try:
            while True:
                kind, number, value = pickle.loads(self._connection.recv_bytes())
                self.last_beat = time.monotonic()
                if kind != "beat":
                    self._take(kind, number, value)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_SECONDS)
            for number in list(self._pending):
                self._finish(number, self.lost())

    def _take(self, kind: str, number: int, value: object) -> None:
        if kind == "event":
            self._pending[number].events.append(value)
            with self._changed:
                self._changed.notify_all()
        elif kind == "error":
            error, text = value
            error.add_note(f"raised on rank {self.rank} of {self.size}:\n{text}")
            self._finish(number, error)
        else:
            self._finish(number, None, value)

    def _finish(self, number: int, error: BaseException | None, value: object = None) -> None:
        call = self._pending.pop(number)
        call.set(value, error)
        with self._changed:
            self._changed.notify_all()

    def lost(self) -> WorkerLostError:
        """What happened to the process, and during which call."""
        doing = next((call.what for call in self._pending.values()), "nothing")
        code = self._process.poll()
        if code is None:
            silent = time.monotonic() - self.last_beat
            how = f"gave no sign of life for {silent:.0f} s (cluster.worker_timeout_s)"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return WorkerLostError(f"rank {self.rank} of {self.size} (process {self.pid}) {how}; it was doing: {doing}")

    def kill(self) -> None:
        """Ends the process and whatever it started, and collects it. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class ProcessWorkers:
    """The processes of a cluster: started together, ended together.

    Args:
        count: how many ranks.
        threads: of each.
        silence: seconds without a sign of life after which a worker counts as lost.
        deadline: seconds that a call between ranks may take.
    """

    def __init__(self, count: int, threads: int, silence: float, deadline: float) -> None:
        import torch.distributed as dist

        self._changed, self._silence = threading.Condition(), silence
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False
        )
        self._workers: list[ProcessWorker] = []
        try:
            for rank in range(count):
                join = {
                    "rank": rank,
                    "size": count,
                    "host": "127.0.0.1",
                    "port": self._store.port,
                    "deadline": deadline,
                    "threads": threads,
                }
                self._workers.append(ProcessWorker(join, self._changed))
            self.wait([worker.joined for worker in self._workers])
        except BaseException:
            self.kill()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def __getitem__(self, rank: int) -> ProcessWorker:
        return self._workers[rank]

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """The values of calls that the ranks make together.

        Raises the error of the rank that failed, with its own traceback as a note. Where another rank would wait for the failed
        one, or where one is lost, all processes are ended first.
        """
        while not all(call.done() for call in calls):
            with self._changed:
                self._changed.wait_for(
                    lambda: all(c.done() for c in calls) or any(c.events or c.error for c in calls), _SLICE
                )
            for call in calls:
                call.tell_events()
            lost = [c for c in calls if not c.done() and time.monotonic() - c.worker.last_beat > self._silence]
            if lost:
                error = lost[0].worker.lost()
                self.kill()
                raise error
            if any(call.error for call in calls):
                self._let_end(calls)
        for call in calls:
            call.tell_events()
        if error := self._reason(calls):
            if isinstance(error, WorkerLostError):
                self.kill()  # the others cannot go on without it
            raise error
        return [call.result() for call in calls]

    def _let_end(self, calls: Sequence[WorkerCall]) -> None:
        """One rank has failed: the others may say why; those that go on waiting are ended."""
        end = time.monotonic() + _GRACE_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: all(call.done() for call in calls), end - time.monotonic())
        if not all(call.done() for call in calls):
            error = self._reason([call for call in calls if call.done()])
            self.kill()
            raise error

    @staticmethod
    def _reason(calls: Sequence[WorkerCall]) -> BaseException | None:
        """Of all errors the one that is the others' reason: a lost process, then a rank's own failure."""
        from nemo_rl_cpp._native import C
        from nemo_rl_cpp.distributed.ranks import OtherRankFailedError

        errors = [call.error for call in calls if call.error is not None]
        follow = (OtherRankFailedError, C.PeerLost, C.TimedOut)
        order = sorted(errors, key=lambda e: 0 if isinstance(e, WorkerLostError) else 2 if isinstance(e, follow) else 1)
        return order[0] if order else None

    def kill(self) -> None:
        """Ends all processes. May be called again."""
        for worker in self._workers:
            worker.kill()


__all__ = ["ProcessWorker", "ProcessWorkers", "WorkerCall", "WorkerLostError"]
