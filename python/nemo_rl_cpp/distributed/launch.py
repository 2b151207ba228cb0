"""The worker processes of a run, started by the run on this machine, or by `torchrun` or `srun` on any machine.

`torchrun` and `srun` describe the ranks by environment variables. Rank 0 runs the training loop and starts its own
worker. The other ranks are workers: they connect to torch.distributed's TCP store (MASTER_ADDR, MASTER_PORT), read rank
0's address there, connect to rank 0 and answer its calls, which are pickled. Nothing is unpickled before each side has
proved that it knows a secret: NEMO_RL_LAUNCH_TOKEN, or a random secret that rank 0 writes to the store."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nemo_rl_cpp.config.cluster import ClusterConfig, engines_of, launcher_variables
from nemo_rl_cpp.config.errors import ConfigError, Problem
from nemo_rl_cpp.distributed import worker_calls
from nemo_rl_cpp.distributed.worker import SocketWorker, ignore_signals, worker_environment
from nemo_rl_cpp.distributed.worker_calls import Listener, Patience, WorkerCall, WorkerLostError, Workers, values_of

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

TOKEN = "NEMO_RL_LAUNCH_TOKEN"
MEETING_SECONDS = 1800.0  # timeout for all ranks to arrive: rank 0 reads data and checkpoints first
HANDSHAKE_SECONDS = 10.0
C = TypeVar("C")


class Launch(NamedTuple):
    """The settings that a launcher (`torchrun`, `srun`) gives this process in environment variables: rank and number of
    ranks, address of torch.distributed's TCP store, and the variable that gave `size`, such as WORLD_SIZE."""

    rank: int
    size: int
    host: str
    port: int
    size_variable: str


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the settings that a launcher gave this process; None if it is not one of several launched ranks."""
    variables = launcher_variables(environment)
    if variables is None:
        return None
    rank_name, size_name = variables
    rank, size = int(environment[rank_name]), int(environment[size_name])
    if size == 1:
        return None
    host = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise ValueError("MASTER_ADDR is not set: export the address of rank 0's node before srun (docs/cluster.md)")
    return Launch(rank, size, host, int(environment.get("MASTER_PORT") or 29500), size_name)


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


def take_own_gpu(launch: Launch, environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide from this launched rank all GPUs but one, according to its rank on this machine."""
    gpus, place = visible_gpus(), environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or launch.rank
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[int(place) % len(gpus)]


def check_launch(cluster: ClusterConfig, launch: Launch, engines: int = 0) -> None:
    """Raise ConfigError if the configuration does not fit ranks that a launcher has started: if it sets another number
    of workers, restarts of workers (only the launcher can restart them), separate workers for generation (`engines` >
    0), or an executor that would make every rank a run of its own."""
    if cluster.executor not in ("processes", "auto"):
        text = (
            f"is {cluster.executor}, but {launch.size_variable} is {launch.size}, so every rank would be a run of its own: set it to auto or "
            "processes, or start one process"
        )
        raise ConfigError([Problem("", "cluster.executor", text)])
    problems = []
    if engines:
        text = "is false, but all ranks that a launcher has started train: set it to true, or let the run start its workers itself, or take ray"
        problems.append(Problem("", "policy.generation.colocated.enabled", text))
    if cluster.executor != "auto" and cluster.processes != launch.size:
        text = (
            f"* cluster.num_nodes is {cluster.gpus_per_node} * {cluster.num_nodes} = {cluster.processes}, but {launch.size_variable} is "
            f"{launch.size}: set cluster.gpus_per_node and cluster.num_nodes to what was launched, or launch {cluster.processes} ranks"
        )
        problems.append(Problem("", "cluster.gpus_per_node", text))
    if cluster.max_restarts:
        text = (
            f"is {cluster.max_restarts}, but a launcher has started the ranks, and only it can start them again: set it to 0, and use "
            "torchrun --max-restarts or sbatch --requeue; the run resumes from its newest checkpoint"
        )
        problems.append(Problem("", "cluster.max_restarts", text))
    if problems:
        raise ConfigError(problems)


def serving(load: Callable[..., C]) -> Callable[..., C]:
    """Return a function like `load`, which loads a configuration. In a process that a launcher started with rank 1 or
    higher its calls do not return: the process becomes a worker."""

    def load_and_serve(*arguments: object) -> C:
        config = load(*arguments)
        if "--dry-run" not in sys.argv and (launch := launched()) is not None:
            check_launch(config.cluster, launch, engines_of(config))
            if launch.rank > 0:
                if config.cluster.device == "cuda":
                    take_own_gpu(launch)
                serve(launch)
        return config

    return load_and_serve


def serve(launch: Launch) -> None:
    """Connect this process, a launched rank above 0, to rank 0, answer calls until the connection closes, and exit."""
    ignore_signals()
    store = meet(launch)
    reached = socket.create_connection((launch.host, int(store.get("port"))), timeout=HANDSHAKE_SECONDS)
    address = reached.getsockname()[0]
    connection, token = as_connection(reached), _secret(store)
    answer_challenge(connection, token)
    deliver_challenge(connection, token)
    connection.send_bytes(json.dumps({"rank": launch.rank, "pid": os.getpid(), "address": address}).encode())
    _wait_at_most(connection, 0)
    join = json.loads(connection.recv_bytes())
    sys.stdout = open(os.devnull, "w")  # rank 0 prints what all ranks would print
    SocketWorker(connection).run(join | {"address": address})


def meet(launch: Launch) -> Store:
    """Connect to torch.distributed's TCP store, wait for all ranks, and return it. Raise TimeoutError without them."""
    from torch.distributed import PrefixStore, rendezvous

    limit = timedelta(seconds=MEETING_SECONDS)
    # torchrun's store outlives an attempt, and the next attempt must not read the previous attempt's port
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(rendezvous(f"tcp://{launch.host}:{launch.port}", launch.rank, launch.size, timeout=limit))
        return PrefixStore(f"nemo_rl_cpp/{attempt}", store)
    except RuntimeError as error:
        raise TimeoutError(
            f"rank {launch.rank} of {launch.size} did not meet the others at {launch.host}:{launch.port} (MASTER_ADDR, MASTER_PORT) "
            f"within {MEETING_SECONDS:.0f} s: {error}"
        ) from error


def listen(launch: Launch, store: Store) -> tuple[socket.socket, bytes]:
    """Open the socket at which rank 0 accepts connections, and write its port to the store. Return (socket, secret).
    The secret, by which workers prove that they belong to the run, comes from the environment; if it has none, a new
    one is written to the store."""
    listening = socket.create_server((socket.gethostbyname(launch.host), 0))
    if not os.environ.get(TOKEN):
        store.set("secret", secrets.token_hex(32))
    store.set("port", str(listening.getsockname()[1]))
    return listening, _secret(store)


def _secret(store: Store) -> bytes:
    return os.environ.get(TOKEN, "").encode() or store.get("secret")


def admit(reached: socket.socket, token: bytes) -> tuple[Connection, dict]:
    """Check that a connected rank knows the secret. Return (the connection, what the rank reports about itself). For
    any other peer raise OSError, EOFError, ValueError or AuthenticationError; nothing that it sends is unpickled."""
    connection = as_connection(reached)
    try:
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        told = json.loads(connection.recv_bytes(1 << 16))
        _wait_at_most(connection, 0)
        return connection, told
    except BaseException:
        connection.close()
        raise


def as_connection(reached: socket.socket) -> Connection:
    """Return a `Connection` over the socket `reached`, which detects a dead peer. A read or write fails after
    HANDSHAKE_SECONDS, so that a silent peer cannot block the run; `_wait_at_most(connection, 0)` removes this limit."""
    reached.setblocking(True)
    reached.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, option):
            reached.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection = Connection(reached.detach())
    _wait_at_most(connection, HANDSHAKE_SECONDS)
    return connection


def _wait_at_most(connection: Connection, seconds: float) -> None:
    """Set the timeout, in seconds, of a single read or write on a connection; 0: no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as known:
        value = struct.pack("ll", int(seconds), 0)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        known.setblocking(True)


class SocketPeer:
    """A worker (process `pid`, on another machine if `where` names one) connected by a socket. One thread sends calls;
    another receives results and heartbeats."""

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
        """Return the WorkerLostError for this worker, which says what happened to the process, and in which call."""
        with self._lock:
            doing = next((call.what for call in self._pending.values()), "nothing")
        who = f"{self.role} {self.rank} of {self.size} (process {self.pid}{self.where})"
        return WorkerLostError(f"{who} {self._how()}; it was doing: {doing}")

    def _how(self) -> str:
        return f"gave no sign of life for {time.monotonic() - self.last_beat:.0f} s (cluster.worker_timeout_s)"

    def call(self, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start and return a call of `method` of the worker's object number `target` (see `Workers.call`)."""
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
        """Stop the threads and close the connection. Further calls do nothing."""
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

    def __init__(self, join: dict, changed: threading.Condition, role: str = "rank", gpu: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with theirs:
            program = [sys.executable, "-P", "-m", "nemo_rl_cpp.distributed.worker"]
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), role, json.dumps(join)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **worker_environment(join["threads"]), **visible},
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
        """Kill the process and all its child processes. Further calls do nothing."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)
        self._wait_for_end()  # a process in uninterruptible sleep ends later
        super().kill()


class ProcessWorkers(Workers):
    """The `count` worker processes of a cluster, of `threads` threads each, which start and stop together.

    Args:
        silence: seconds without a heartbeat after which a worker is reported as lost.
        deadline: timeout in seconds of a message between ranks.
        role: the word for a worker in messages, such as "rank".
        gpus: the GPU of each worker on this machine, by the names of CUDA_VISIBLE_DEVICES; none: workers compute on the
            CPU."""

    tells_events = True
    host = "127.0.0.1"

    def __init__(
        self, count: int, threads: int, silence: float, deadline: float, role: str = "rank", gpus: Sequence[str] = ()
    ) -> None:
        self._changed, self._silence = threading.Condition(), silence
        self._workers: list[SocketPeer] = []
        try:
            backend = "nccl" if gpus else "gloo"
            self._start({"size": count, "threads": threads, "deadline": deadline, "backend": backend}, role, gpus)
            self.pids = [worker.pid for worker in self._workers]
            self.wait([worker.joined for worker in self._workers])
        except BaseException:
            self.kill()
            raise

    def _start(self, join: dict, role: str, gpus: Sequence[str]) -> None:
        self._store = rendezvous_store(self.host, join["deadline"])
        join |= {"host": self.host, "port": self._store.port}
        for rank in range(join["size"]):
            gpu = gpus[rank] if gpus else None
            self._workers.append(ProcessWorker({"rank": rank, **join}, self._changed, role, gpu))

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        return self._workers[rank].call(target, method, payload, listener)

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        patience, looked_at = Patience(calls), time.monotonic()
        while not all(call.done() for call in calls) and not patience.is_over():
            with self._changed:
                self._changed.wait_for(
                    lambda: all(c.done() for c in calls) or any(c.events for c in calls), worker_calls.WAIT_SECONDS
                )
            for call in calls:
                call.tell_events()
            now = time.monotonic()
            if now - looked_at > 4 * worker_calls.WAIT_SECONDS:  # this process was stopped: heartbeats are unread
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
    """Return a TCP store on a free port of `host`, at which ranks meet. `deadline`: timeout of each operation in
    seconds."""
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
        """Close the connection, so that the worker exits. Kill it if it is on this machine and does not respond."""
        if self._local and self.failed and not self.closed:
            # printed now, because the launcher ends this process too once that rank has ended
            print(f"error: {self.lost()}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
        super().kill()


class LaunchedWorkers(ProcessWorkers):
    """The workers of a run whose launcher started all ranks but the first. They cannot be restarted."""

    def _start(self, join: dict, role: str, gpus: Sequence[str]) -> None:
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
            self._workers.append(ProcessWorker({"rank": 0, **join}, self._changed, gpu=gpus[0] if gpus else None))
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
