"""Ranks that `torchrun` or `srun` has started, as their environment variables say, and how they find and trust each other.

Rank 0 is the run: it drives, and has a worker of its own. The others are workers: they connect to rank 0 and answer its calls, which
are pickles. So that nobody else can send any, both ends prove that they know a secret first: the variable NEMO_RL_LAUNCH_TOKEN
of all ranks, or a file that rank 0 writes into a folder that only this user can read (NEMO_RL_LAUNCH_DIR, on all nodes; else
`~/.cache/nemo_rl_cpp/launch`).
"""

import hashlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import NamedTuple, TypeVar

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.config.errors import ConfigError, Problem
from nemo_rl_cpp.config.launcher import launcher_variables
from nemo_rl_cpp.config.resources import engines_of

TOKEN, FOLDER = "NEMO_RL_LAUNCH_TOKEN", "NEMO_RL_LAUNCH_DIR"
MEETING_SECONDS = 1800.0  # until all ranks must have come: rank 0 reads data and checkpoints before it opens its door
HANDSHAKE_SECONDS = 10.0
_PAUSE = 0.2
C = TypeVar("C")


class Launch(NamedTuple):
    """What the launcher says of this process.

    Attributes:
        rank, size: of this process, and how many there are.
        host, port: where rank 0 is, as the launcher says; the port itself may be the launcher's own.
        sizes: the variable that `size` was read from.
        job: tells this launch from another one of the same user.
    """

    rank: int
    size: int
    host: str
    port: int
    sizes: str
    job: str


class RendezvousAddress(NamedTuple):
    """Where rank 0 listens, and the secret."""

    host: str
    port: int
    token: bytes


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch of this process; None where nobody launched several. Raises ValueError for variables that contradict each other."""
    variables = launcher_variables(environment)
    if variables is None:
        return None
    rank_name, size_name = variables
    rank, size = (_number(environment, name) for name in (rank_name, size_name))
    if size == 1:
        return None
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name} is {rank}, but {size_name} is {size}: ranks count from 0 to {size - 1}")
    job = environment.get("SLURM_JOB_ID", environment.get("TORCHELASTIC_RUN_ID", "none"))
    host = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise ValueError(
            "MASTER_ADDR is not set: export the address of the node of rank 0 before srun (docs/cluster.md)"
        )
    port = _number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else 29500
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", environment.get("SLURM_RESTART_COUNT", "0"))
    step = environment.get("SLURM_STEP_ID", "") if "SLURM_PROCID" in environment else ""
    return Launch(rank, size, host, port, size_name, f"{job}.{step}.{attempt}")


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {environment.get(name)!r}: the launcher must set it to a whole number") from None


def check_launch(cluster: ClusterConfig, launch: Launch, engines: int = 0) -> None:
    """Raises ConfigError where the file asks for another number of workers than were launched, for what a launcher does, for
    `engines` of their own, or for an executor that would let every rank be a run."""
    problems = []
    if cluster.executor not in ("processes", "auto"):
        problems.append(
            Problem(
                "", "cluster.executor",
                f"is {cluster.executor}, but {launch.sizes} is {launch.size}, so every rank would be a run of its own: set it to auto or processes, or "
                "start one process",
            )
        )  # fmt: skip
        raise ConfigError(problems)
    if engines:
        problems.append(
            Problem(
                "", "policy.generation.colocated.enabled",
                "is false, but all ranks that a launcher has started train: set it to true, or let the run start its workers itself, or take ray",
            )
        )  # fmt: skip
    if cluster.executor != "auto" and cluster.processes != launch.size:
        problems.append(
            Problem(
                "", "cluster.gpus_per_node",
                f"* cluster.num_nodes is {cluster.gpus_per_node} * {cluster.num_nodes} = {cluster.processes}, but {launch.sizes} is "
                f"{launch.size}: set cluster.gpus_per_node and cluster.num_nodes to what was launched, or launch {cluster.processes} ranks",
            )
        )  # fmt: skip
    if cluster.max_restarts:
        problems.append(
            Problem(
                "", "cluster.max_restarts",
                f"is {cluster.max_restarts}, but a launcher has started the ranks, and only it can start them again: set it to 0, and use "
                "torchrun --max-restarts or sbatch --requeue; the run goes on from its newest checkpoint",
            )
        )  # fmt: skip
    if problems:
        raise ConfigError(problems)


def serving(load: Callable[..., C]) -> Callable[..., C]:
    """`load` of a configuration; in a launched process of rank 1 or higher it does not return: the process is a worker then."""

    def load_and_serve(*arguments: object) -> C:
        config = load(*arguments)
        if "--dry-run" not in sys.argv and (launch := launched()) is not None:
            check_launch(config.cluster, launch, engines_of(config))
            if launch.rank > 0:
                serve(launch)
        return config

    return load_and_serve


def serve(launch: Launch) -> None:
    """Connects to rank 0 and answers its calls until it closes the connection; then the process ends with status 0. Raises
    TimeoutError where rank 0 is not there."""
    from nemo_rl_cpp.distributed.worker import SocketWorker, ignore_signals

    ignore_signals()
    connection, address = _enter(launch)
    connection.send_bytes(
        json.dumps({"rank": launch.rank, "size": launch.size, "pid": os.getpid(), "address": address}).encode()
    )
    join = json.loads(connection.recv_bytes())
    sys.stdout = open(os.devnull, "w")  # what all ranks would say is said once
    SocketWorker(connection).run(join | {"address": address})


def _enter(launch: Launch) -> tuple[Connection, str]:
    """A connection on which both ends know the secret, and this process's address on it."""
    end, why = time.monotonic() + MEETING_SECONDS, "rank 0 has written no address yet"
    while time.monotonic() < end:
        try:
            door = _rendezvous_address(launch)
            reached = socket.create_connection((door.host, door.port), timeout=HANDSHAKE_SECONDS)
            address = reached.getsockname()[0]
            connection = as_connection(reached)
            answer_challenge(connection, door.token)
            deliver_challenge(connection, door.token)
            _wait_at_most(connection, 0)
            return connection, address
        except (OSError, EOFError, ValueError, AuthenticationError) as error:  # of an earlier launch, or not yet there
            why = str(error) or type(error).__name__
        time.sleep(_PAUSE)
    raise TimeoutError(
        f"rank {launch.rank} of {launch.size} did not reach rank 0 at {launch.host} within {MEETING_SECONDS:.0f} s ({why}): the nodes must "
        f"share {folder_of(launch).parent} ({FOLDER}), or all ranks need the same {TOKEN} (docs/cluster.md)"
    )


def as_connection(reached: socket.socket) -> Connection:
    """A connection over a socket, which notices that the other machine is gone. Until `_wait_at_most(connection, 0)` nothing on
    it takes longer than a handshake may."""
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
    """The longest wait of one read or write; 0: none."""
    known = socket.socket(fileno=os.dup(connection.fileno()))
    with known:
        value = struct.pack("ll", int(seconds), 0)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        known.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        known.setblocking(True)


def admit(reached: socket.socket, token: bytes) -> tuple[Connection, dict]:
    """The connection of a rank that knows the secret, and what it says of itself. Raises OSError, EOFError, ValueError or
    AuthenticationError for anybody else. Nothing is unpickled here."""
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


# ---- where rank 0 listens


def open_rendezvous(launch: Launch) -> tuple[socket.socket, RendezvousAddress, Path | None]:
    """Rank 0 begins to listen: (the listening socket, where and with which secret, the file that says so)."""
    given = os.environ.get(TOKEN)
    host = socket.gethostbyname(launch.host)
    # a port that all ranks know, next to the launcher's own; else any, which the file tells
    listening = socket.create_server((host, launch.port + 1 if given else 0))
    door = RendezvousAddress(
        launch.host, listening.getsockname()[1], given.encode() if given else secrets.token_bytes(32)
    )
    if given:
        return listening, door, None
    file = folder_of(launch)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(file.parent)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as out:
        json.dump({"host": door.host, "port": door.port, "token": door.token.hex()}, out)
    new.replace(file)
    return listening, door, file


def folder_of(launch: Launch) -> Path:
    """The file that tells where rank 0 of this launch listens."""
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "nemo_rl_cpp" / "launch"
    name = hashlib.sha256(f"{launch.host}:{launch.port}:{launch.job}".encode()).hexdigest()[:16]
    return Path(folder) / name


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} can be written by others: `chmod 700 {folder}`, or set {FOLDER} to a folder of your own"
        )


def _rendezvous_address(launch: Launch) -> RendezvousAddress:
    given = os.environ.get(TOKEN)
    if given:
        return RendezvousAddress(launch.host, launch.port + 1, given.encode())
    file = folder_of(launch)
    if file.stat().st_uid != os.getuid():
        raise PermissionError(f"{file} is somebody else's")
    told = json.loads(file.read_text())
    return RendezvousAddress(told["host"], told["port"], bytes.fromhex(told["token"]))
