"""Workers in processes, as the run's process sees them: started on this machine, or by `torchrun` or `srun` on any."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed import worker_calls
from nemo_rl_cpp.distributed.launch import MEETING_SECONDS, Launch, admit, launched, open_rendezvous
from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.distributed.worker_calls import Patience, WorkerCall, WorkerLostError, Workers, values_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_SLICE = 0.5  # seconds of one wait: Python looks at signals between them


class SocketPeer:
    """A worker at the other end of a socket: calls go out, answers and signs of life come in, each on a thread."""

    def __init__(
        self, rank: int, size: int, connection: Connection, changed: threading.Condition, role: str = "rank"
    ) -> None:  # fmt: skip
        self.rank, self.size, self.role, self._connection = rank, size, role, connection
        self._changed, self._pending, self._last_call = changed, {}, 0
        self.last_beat = time.monotonic()
        self.closed = self.failed = False
        self._outgoing: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._ended: BaseException | None = None
        self._lock = threading.Lock()  # of _pending and _ended, which two threads change
        self.joined = self._expect(-1, "meeting the other ranks")
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]

    def begin(self) -> None:
        """Starts to read and to write."""
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Its process."""
        raise NotImplementedError

    def lost(self) -> WorkerLostError:
        """What happened to it, and during which call."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends it. May be called again."""
        raise NotImplementedError

    def call(
        self, target: int, method: str, payload: bytes, event: str | None = None, on_event: Callable[..., None] | None = None
    ) -> WorkerCall:  # fmt: skip
        """See `Workers.call`."""
        self._last_call += 1
        call = self._expect(self._last_call, method.strip("_"), on_event)
        self._outgoing.put((self._last_call, target, method, payload, event))
        return call

    def doing(self) -> str:
        """What it has not yet answered."""
        with self._lock:
            return next((call.what for call in self._pending.values()), "nothing")

    def _expect(self, number: int, what: str, on_event: Callable[..., None] | None = None) -> WorkerCall:
        call = WorkerCall(self.rank, self.size, what, on_event, self.role)
        with self._lock:
            if self._ended is None:
                self._pending[number] = call
                return call
        call.set(None, WorkerLostError(f"{self._ended}; it cannot do: {what}"))
        return call

    def _write(self) -> None:
        """Beside the caller, who looks at signs of life while a stopped process reads nothing."""
        with contextlib.suppress(OSError):  # it has died: the reader says so
            while (message := self._outgoing.get()) is not None:
                self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(*pickle.loads(self._connection.recv_bytes()))
                self._notify()
        except (EOFError, OSError):
            self.closed = True
            self._wait_for_end()
            self._end(self.lost())
        except BaseException as error:  # an answer that cannot be read
            self._end(error)

    def _wait_for_end(self) -> None:
        """Until more may be known of why the socket was closed."""

    def _take(self, kind: str, number: int, value: object) -> None:
        self.last_beat = time.monotonic()
        if kind == "event":
            self._pending[number].events.append(value)
        elif kind == "answer":
            with self._lock:
                call = self._pending.pop(number)
            call.end(value)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._ended, calls = error, list(self._pending.values())
            self._pending.clear()
        for call in calls:
            call.set(None, error)
        self._outgoing.put(None)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def hang_up(self) -> None:
        """Ends the threads and the connection."""
        self._outgoing.put(None)
        if not self._connection.closed:
            with contextlib.suppress(OSError):  # wakes the reader where the other end is still there
                with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(worker_calls.GRACE_SECONDS)
        self._connection.close()


class ProcessWorker(SocketPeer):
    """One process, started by exec in a session of its own, so that a Ctrl-C in the terminal reaches the run's process alone."""

    def __init__(self, join: dict, changed: threading.Condition, role: str = "rank") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nemo_rl_cpp.distributed.worker", str(theirs.fileno()), role, json.dumps(join)],
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                env={**os.environ, **worker_environment(join["threads"])},
            )  # fmt: skip
        super().__init__(join["rank"], join["size"], Connection(ours.detach()), changed, role)
        self.begin()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _wait_for_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=worker_calls.GRACE_SECONDS)

    def lost(self) -> WorkerLostError:
        """What happened to the process, and during which call."""
        doing, code = self.doing(), self._process.poll()
        if code is None:
            silent = time.monotonic() - self.last_beat
            how = f"gave no sign of life for {silent:.0f} s (cluster.worker_timeout_s)"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return WorkerLostError(
            f"{self.role} {self.rank} of {self.size} (process {self.pid}) {how}; it was doing: {doing}"
        )

    def kill(self) -> None:
        """Ends the process and whatever it started, and collects it. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel does not let go ends later
            self._process.wait(timeout=worker_calls.GRACE_SECONDS)
        self.hang_up()


class ProcessWorkers(Workers):
    """The processes of a cluster: started together, ended together.

    Args:
        count: how many ranks.
        threads: of each.
        silence: seconds without a sign of life after which a worker counts as lost.
        deadline: seconds that a call between ranks may take.
        role: what messages call a worker.
        backend: what connects the ranks, see `ranks.connect`.
    """

    tells_events = True
    host = "127.0.0.1"

    def __init__(
        self, count: int, threads: int, silence: float, deadline: float, role: str = "rank", backend: str = "gloo"
    ) -> None:  # fmt: skip
        self._changed, self._silence = threading.Condition(), silence
        self._store = rendezvous_store(self.host, deadline)
        self._workers: list[SocketPeer] = []
        meeting = {"host": self.host, "port": self._store.port, "deadline": deadline, "backend": backend}
        join = {"size": count, "threads": threads, **meeting}
        try:
            for rank in range(count):
                self._workers.append(ProcessWorker({"rank": rank, **join}, self._changed, role))
            self.wait([worker.joined for worker in self._workers])
        except BaseException:
            self.kill()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def call(
        self, rank: int, target: int, method: str, payload: bytes, event: str | None = None, on_event: Callable[..., None] | None = None
    ) -> WorkerCall:  # fmt: skip
        """See `Workers.call`."""
        return self._workers[rank].call(target, method, payload, event, on_event)

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        """See `Workers.wait`."""
        patience, looked_at = Patience(calls), time.monotonic()
        while not all(call.done() for call in calls) and not patience.is_over():
            with self._changed:
                self._changed.wait_for(
                    lambda: all(call.done() for call in calls) or any(call.events for call in calls), _SLICE
                )
            for call in calls:
                call.tell_events()
            waiting = [call for call in calls if not call.done()]
            now = time.monotonic()
            if now - looked_at > 4 * _SLICE:  # this very process was stopped: the workers' beats wait to be read
                for worker in self._workers:
                    worker.last_beat = now
            looked_at = now
            silent = [call for call in waiting if now - self._workers[call.rank].last_beat > self._silence]
            if silent:
                worker = self._workers[silent[0].rank]
                worker.failed = True
                silent[0].set(None, worker.lost())
        for call in calls:
            call.tell_events()
        return values_of(calls, self)

    def kill(self) -> None:
        """See `Workers.kill`."""
        for worker in self._workers:
            worker.kill()
        self._store = None


def rendezvous_store(host: str, deadline: float) -> TCPStore:
    """A TCP store at `host`, on a free port, where ranks meet (`ranks.connect`)."""
    import torch.distributed as dist

    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False)


class LaunchedWorker(SocketPeer):
    """A rank that the launcher has started, on this machine or another."""

    def __init__(self, connection, told: dict, join: dict, changed: threading.Condition, local: bool) -> None:
        super().__init__(join["rank"], join["size"], connection, changed)
        self._pid, self._address, self._local = told["pid"], told["address"], local
        connection.send_bytes(json.dumps(join).encode())
        self.begin()

    @property
    def pid(self) -> int:
        """Its process, on its own machine."""
        return self._pid

    def lost(self) -> WorkerLostError:
        """What is known of it, and during which call."""
        silent = time.monotonic() - self.last_beat
        how = (
            "is gone: its connection was closed"
            if self.closed
            else f"gave no sign of life for {silent:.0f} s (cluster.worker_timeout_s)"
        )
        where = "" if self._local else f" on {self._address}"
        return WorkerLostError(
            f"rank {self.rank} of {self.size} (process {self.pid}{where}) {how}; it was doing: {self.doing()}"
        )

    def kill(self) -> None:
        """Closes its connection, at which it ends, and kills it where it is on this machine and silent. May be called again."""
        if self._local and self.failed and not self.closed:
            # said now: the launcher ends this process too as soon as it sees that rank end
            print(f"error: {self.lost()}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        self.hang_up()


class LaunchedWorkers(ProcessWorkers):
    """See `ProcessWorkers`; all ranks but the first are launched already, and ended ones cannot be started again."""

    def __init__(self, count: int, threads: int, silence: float, deadline: float, role: str = "rank") -> None:
        launch = launched()
        if launch is None or launch.size != count or role != "rank":
            raise ValueError(
                f"{count} workers called {role} were asked for, but a launcher has started {1 if launch is None else launch.size} ranks, which "
                "all train: engines of their own (policy.generation.colocated.enabled=false) need a run that starts its workers itself, or ray"
            )
        if launch.rank > 0:
            raise ValueError(
                f"rank {launch.rank} of {launch.size} is a worker: start the run by a run script, or wrap what loads your configuration, "
                "nemo_rl_cpp.distributed.launch.serving(load), in which this rank then serves"
            )
        self._changed, self._silence = threading.Condition(), silence
        self._workers = []
        listening, door, file = open_rendezvous(launch)
        self.host = host = socket.gethostbyname(launch.host)
        self._store = rendezvous_store(host, deadline)
        join = {"size": launch.size, "host": host, "port": self._store.port, "deadline": deadline, "threads": threads}
        try:
            self._workers.append(ProcessWorker({"rank": 0, **join}, self._changed))
            self._workers += self._meet(listening, launch, door.token, join)
            self.wait([worker.joined for worker in self._workers])
        except BaseException:
            self.kill()
            raise
        finally:
            listening.close()
            if file is not None:
                file.unlink(missing_ok=True)

    def _meet(self, listening: socket.socket, launch: Launch, token: bytes, join: dict) -> list[LaunchedWorker]:
        found: dict[int, LaunchedWorker] = {}
        end = time.monotonic() + MEETING_SECONDS
        listening.settimeout(_SLICE)
        while len(found) < launch.size - 1:
            if time.monotonic() > end:
                missing = [rank for rank in range(1, launch.size) if rank not in found]
                raise WorkerLostError(
                    f"rank {', '.join(map(str, missing))} of {launch.size} did not come within {MEETING_SECONDS:.0f} s; it was doing: starting"
                )
            try:
                reached, peer = listening.accept()
                connection, told = admit(reached, token)
            except (OSError, EOFError, ValueError, AuthenticationError):  # nobody came, or somebody who is none of us
                continue
            rank = told.get("rank")
            if told.get("size") != launch.size or rank in found or rank not in range(1, launch.size):
                connection.close()
                continue
            local = peer[0] == listening.getsockname()[0]
            found[rank] = LaunchedWorker(connection, told, {"rank": rank, **join}, self._changed, local)
        return [found[rank] for rank in sorted(found)]
