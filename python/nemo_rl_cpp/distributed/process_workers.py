"""The worker processes of a run, started on this machine, or by `torchrun` or `srun` on any machine."""

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
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed import worker_calls
from nemo_rl_cpp.distributed.launch import HANDSHAKE_SECONDS, admit, launched, listen, meet
from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.distributed.worker_calls import Listener, Patience, WorkerCall, WorkerLostError, Workers, values_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_SLICE = 0.5  # seconds per wait; Python handles signals between waits


class SocketPeer:
    """A worker connected by a socket. One thread sends calls; another receives results and heartbeats.

    Attributes:
        pid: process id of the worker on its machine.
        where: names the machine in error messages; empty for this machine.
    """

    pid: int
    where = ""

    def __init__(
        self, rank: int, size: int, connection: Connection, changed: threading.Condition, role: str = "rank"
    ) -> None:
        self.rank, self.size, self.role, self._connection = rank, size, role, connection
        self._changed, self._pending, self._last_call = changed, {}, 0
        self.last_beat = time.monotonic()
        self.closed = self.failed = False
        self._outgoing: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._ended: BaseException | None = None
        self._lock = threading.Lock()  # guards _pending and _ended, which two threads change
        self.joined = self._expect(-1, "meeting the other ranks")
        # a separate thread writes, so that the caller still checks heartbeats while a stopped process reads nothing
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def lost(self) -> WorkerLostError:
        """Return the WorkerLostError for this worker. Its message says what happened to the process, and during which
        call.
        """
        with self._lock:
            doing = next((call.what for call in self._pending.values()), "nothing")
        who = f"{self.role} {self.rank} of {self.size} (process {self.pid}{self.where})"
        return WorkerLostError(f"{who} {self._how()}; it was doing: {doing}")

    def _how(self) -> str:
        return f"gave no sign of life for {time.monotonic() - self.last_beat:.0f} s (cluster.worker_timeout_s)"

    def call(self, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start a call; see `Workers.call`."""
        self._last_call += 1
        event, on_event = listener or (None, None)
        call = self._expect(self._last_call, method.strip("_"), on_event)
        self._outgoing.put((self._last_call, target, method, payload, event))
        return call

    def _expect(self, number: int, what: str, on_event=None) -> WorkerCall:
        call = WorkerCall(self.rank, self.size, what, on_event, self.role)
        with self._lock:
            if self._ended is None:
                self._pending[number] = call
                return call
        call.set(None, WorkerLostError(f"{self._ended}; it cannot do: {what}"))
        return call

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the worker has died, and the reading thread reports it
            while (message := self._outgoing.get()) is not None:
                self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(*pickle.loads(self._connection.recv_bytes()))
                with self._changed:
                    self._changed.notify_all()
        except (EOFError, OSError):
            self.closed = True
            self._wait_for_end()
            error = self.lost()
        except BaseException as unreadable:
            error = unreadable
        with self._lock:
            self._ended, pending, self._pending = error, self._pending, {}
        for call in pending.values():
            call.set(None, error)
        with self._changed:
            self._changed.notify_all()

    def _wait_for_end(self) -> None:
        """Wait, for at most a few seconds, until it is known why the worker's socket was closed."""

    def _take(self, kind: str, number: int, value: object) -> None:
        self.last_beat = time.monotonic()
        if kind == "beat":
            return
        with self._lock:
            call = self._pending.get(number) if kind == "event" else self._pending.pop(number)
        if kind == "answer":
            call.end(value)
        elif call is not None:
            call.events.append(value)

    def kill(self) -> None:
        """Stop the threads and close the connection. Idempotent."""
        self._outgoing.put(None)
        if not self._connection.closed:
            with contextlib.suppress(OSError):  # wakes the reading thread if the peer is still alive
                with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(worker_calls.GRACE_SECONDS)
        self._connection.close()


class ProcessWorker(SocketPeer):
    """A worker process in its own session, so that Ctrl-C in the terminal reaches only the run's main process."""

    def __init__(self, join: dict, changed: threading.Condition, role: str = "rank") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            program = [sys.executable, "-P", "-m", "nemo_rl_cpp.distributed.worker"]
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), role, json.dumps(join)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **worker_environment(join["threads"])},
            )
        self.pid = self._process.pid
        super().__init__(join["rank"], join["size"], Connection(ours.detach()), changed, role)

    def _wait_for_end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=worker_calls.GRACE_SECONDS)

    def _how(self) -> str:
        code = self._process.poll()
        if code is None:
            return super()._how()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def kill(self) -> None:
        """Kill the process and all its child processes. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._wait_for_end()  # a process in uninterruptible sleep ends later
        super().kill()


class ProcessWorkers(Workers):
    """The worker processes of a cluster, which start and stop together.

    Args:
        count: number of ranks.
        threads: threads per worker.
        silence: seconds without a heartbeat after which a worker is reported as lost.
        deadline: timeout in seconds of a message between ranks.
        role: the word for a worker in messages, such as "rank".
        backend: how the ranks are connected, "gloo" or "nccl" (see `ranks.connect`).
    """

    tells_events = True
    host = "127.0.0.1"

    def __init__(
        self, count: int, threads: int, silence: float, deadline: float, role: str = "rank", backend: str = "gloo"
    ) -> None:
        self._changed, self._silence = threading.Condition(), silence
        self._workers: list[SocketPeer] = []
        try:
            self._start({"size": count, "threads": threads, "deadline": deadline, "backend": backend}, role)
            self.wait([worker.joined for worker in self._workers])
        except BaseException:
            self.kill()
            raise

    def _start(self, join: dict, role: str) -> None:
        self._store = rendezvous_store(self.host, join["deadline"])
        join |= {"host": self.host, "port": self._store.port}
        for rank in range(join["size"]):
            self._workers.append(ProcessWorker({"rank": rank, **join}, self._changed, role))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        return self._workers[rank].call(target, method, payload, listener)

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        patience, looked_at = Patience(calls), time.monotonic()
        while not all(call.done() for call in calls) and not patience.is_over():
            with self._changed:
                self._changed.wait_for(lambda: all(c.done() for c in calls) or any(c.events for c in calls), _SLICE)
            for call in calls:
                call.tell_events()
            now = time.monotonic()
            if now - looked_at > 4 * _SLICE:  # this process was stopped, so heartbeats of the workers are unread
                for worker in self._workers:
                    worker.last_beat = now
            looked_at = now
            for call in calls:
                worker = self._workers[call.rank]
                if not call.done() and now - worker.last_beat > self._silence:
                    worker.failed = True
                    call.set(None, worker.lost())
                    break
        for call in calls:
            call.tell_events()
        return values_of(calls, self)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._store = None


def rendezvous_store(host: str, deadline: float) -> TCPStore:
    """Return a TCP store on a free port of `host`, for the rendezvous of the ranks (`ranks.connect`)."""
    import torch.distributed as dist

    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False)


class LaunchedWorker(SocketPeer):
    """A rank that the launcher started, on this or another machine."""

    def __init__(
        self, connection: Connection, told: dict, join: dict, changed: threading.Condition, local: bool
    ) -> None:
        self.pid, self._local = told["pid"], local
        self.where = "" if local else f" on {told['address']}"
        connection.send_bytes(json.dumps({"rank": told["rank"], **join}).encode())
        super().__init__(told["rank"], join["size"], connection, changed)

    def _how(self) -> str:
        return "is gone: its connection was closed" if self.closed else super()._how()

    def kill(self) -> None:
        """Close the worker's connection, which makes it exit. If it is unresponsive on this machine, kill it.
        Idempotent."""
        if self._local and self.failed and not self.closed:
            # printed now, because once that rank ends, the launcher ends this process too
            print(f"error: {self.lost()}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        super().kill()


class LaunchedWorkers(ProcessWorkers):
    """Workers like `ProcessWorkers`, but the launcher started all ranks except the first. They cannot be restarted."""

    def _start(self, join: dict, role: str) -> None:
        launch, size = launched(), join["size"]
        if launch.rank > 0:
            raise ValueError(
                f"rank {launch.rank} of {launch.size} is a worker: start the run by a run script, or wrap what loads your configuration, "
                "nemo_rl_cpp.distributed.launch.serving(load), in which this rank then serves"
            )
        self.host = socket.gethostbyname(launch.host)
        store = meet(launch)
        listening, token = listen(launch, store)
        self._store = rendezvous_store(self.host, join["deadline"])
        join |= {"host": self.host, "port": self._store.port}
        with listening:
            self._workers.append(ProcessWorker({"rank": 0, **join}, self._changed))
            found: dict[int, LaunchedWorker] = {}
            listening.settimeout(3 * HANDSHAKE_SECONDS)
            while len(found) < size - 1:
                try:
                    reached, peer = listening.accept()
                    connection, told = admit(reached, token)
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                    raise WorkerLostError(f"rank {missing} of {size} is gone; it was doing: starting") from None
                except (OSError, EOFError, ValueError, AuthenticationError):  # not a rank of this run
                    continue
                local = peer[0] == listening.getsockname()[0]
                found[told["rank"]] = LaunchedWorker(connection, told, join, self._changed, local)
        self._workers += [found[rank] for rank in sorted(found)]
