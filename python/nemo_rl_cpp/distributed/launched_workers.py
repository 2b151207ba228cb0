"""The workers of a run whose ranks `torchrun` or `srun` has started: one of this process's own, and the ranks that connect to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError

from nemo_rl_cpp.distributed.launch import MEETING_SECONDS, Launch, admit, launched, open_door
from nemo_rl_cpp.distributed.process_workers import ProcessWorker, ProcessWorkers, SocketPeer, meeting_place
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError

_SLICE = 0.5  # seconds of one wait


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
        listening, door, file = open_door(launch)
        self.host = host = socket.gethostbyname(launch.host)
        self._store = meeting_place(host, deadline)
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


__all__ = ["LaunchedWorker", "LaunchedWorkers"]
