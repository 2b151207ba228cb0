"""Ranks started by `torchrun` or `srun`, described by environment variables, and how they connect to rank 0.

Rank 0 runs the training loop and starts its own worker. The other ranks are workers: they rendezvous at torch's store
(MASTER_ADDR, MASTER_PORT), read rank 0's address there, connect to it and answer its calls, which are pickled. Nothing
is unpickled before each side has proved that it knows a secret: NEMO_RL_LAUNCH_TOKEN, or a random secret that rank 0
writes to the store.
"""

import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nemo_rl_cpp.config.cluster import ClusterConfig, engines_of, launcher_variables
from nemo_rl_cpp.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch.distributed import Store

TOKEN = "NEMO_RL_LAUNCH_TOKEN"
MEETING_SECONDS = 1800.0  # timeout for all ranks to arrive: rank 0 reads data and checkpoints first
HANDSHAKE_SECONDS = 10.0
C = TypeVar("C")


class Launch(NamedTuple):
    """The launch settings of this process, which the launcher passes in environment variables.

    Attributes:
        rank, size: rank of this process, and number of ranks.
        host, port: address of torch's store.
        sizes: the environment variable from which `size` was read.
    """

    rank: int
    size: int
    host: str
    port: int
    sizes: str


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launch settings of this process, or None if it was not launched as one of several ranks."""
    variables = launcher_variables(environment)
    if variables is None:
        return None
    rank_name, size_name = variables
    rank, size = int(environment[rank_name]), int(environment[size_name])
    if size == 1:
        return None
    host = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise ValueError(
            "MASTER_ADDR is not set: export the address of the node of rank 0 before srun (docs/cluster.md)"
        )
    return Launch(rank, size, host, int(environment.get("MASTER_PORT") or 29500), size_name)


def check_launch(cluster: ClusterConfig, launch: Launch, engines: int = 0) -> None:
    """Raise ConfigError if the configuration does not fit the launch: it sets a different number of workers, requests
    restarts (which only the launcher can do), has `engines` in workers that do not train, or sets an executor with
    which every rank would start a separate run.
    """
    if cluster.executor not in ("processes", "auto"):
        text = (
            f"is {cluster.executor}, but {launch.sizes} is {launch.size}, so every rank would be a run of its own: set it to auto or "
            "processes, or start one process"
        )
        raise ConfigError([Problem("", "cluster.executor", text)])
    problems = []
    if engines:
        text = "is false, but all ranks that a launcher has started train: set it to true, or let the run start its workers itself, or take ray"
        problems.append(Problem("", "policy.generation.colocated.enabled", text))
    if cluster.executor != "auto" and cluster.processes != launch.size:
        text = (
            f"* cluster.num_nodes is {cluster.gpus_per_node} * {cluster.num_nodes} = {cluster.processes}, but {launch.sizes} is "
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
    """Wrap `load`, which loads a configuration. In a launched process of rank 1 or higher the wrapper does not return:
    the process becomes a worker."""

    def load_and_serve(*arguments: object) -> C:
        config = load(*arguments)
        if "--dry-run" not in sys.argv and (launch := launched()) is not None:
            check_launch(config.cluster, launch, engines_of(config))
            if launch.rank > 0:
                serve(launch)
        return config

    return load_and_serve


def serve(launch: Launch) -> None:
    """Connect this rank to rank 0 and answer the calls of rank 0 until it closes the connection, then exit with status
    0.
    """
    from nemo_rl_cpp.distributed.worker import SocketWorker, ignore_signals

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


def meet(launch: Launch) -> "Store":
    """Wait for all ranks to connect to torch's store, and return the store. Raise TimeoutError if a rank does not
    arrive.
    """
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


def listen(launch: Launch, store: "Store") -> tuple[socket.socket, bytes]:
    """Open rank 0's listening socket, and write its port and the secret to the store. Return the socket and the
    secret."""
    listening = socket.create_server((socket.gethostbyname(launch.host), 0))
    if not os.environ.get(TOKEN):
        store.set("secret", secrets.token_hex(32))
    store.set("port", str(listening.getsockname()[1]))
    return listening, _secret(store)


def _secret(store: "Store") -> bytes:
    return os.environ.get(TOKEN, "").encode() or store.get("secret")


def admit(reached: socket.socket, token: bytes) -> tuple[Connection, dict]:
    """Return (the connection, what the rank reports about itself) for a rank that knows the secret. For any other peer
    raise OSError, EOFError, ValueError or AuthenticationError. Nothing is unpickled."""
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
    """Return a connection over a socket, which detects a dead peer. A read or write fails after HANDSHAKE_SECONDS, so
    that a peer that sends nothing cannot block the run. `_wait_at_most(connection, 0)` removes this limit."""
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
    """Set the timeout of a single read or write on a connection; 0: no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as known:
        value = struct.pack("ll", int(seconds), 0)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        known.setblocking(True)
