"""One process of a run. It makes objects and calls their methods, as the run's own process asks through a socket.

Started by `ProcessWorker` as `python -m nemo_rl_cpp.distributed.worker`. It ends when the socket is closed, whatever it is
doing: a run that was killed leaves no process behind.
"""

import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from nemo_rl_cpp.distributed.worker_objects import WorkerObjects

BEAT_SECONDS = 1.0  # between two signs of life


class SocketWorker:
    """Answers the calls of one socket, one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._calls: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._objects = WorkerObjects()

    def run(self, join: dict) -> None:
        """Meets the other ranks, then answers until the socket is closed."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self._send("answer", -1, self._objects.join(**join))
        while True:
            number, target, method, payload, event = self._calls.get()
            self._send("answer", number, self._objects.call(target, method, payload, event, self._teller(number)))

    def _teller(self, number: int):
        return lambda *told: self._send("event", number, told)

    def _read(self) -> None:
        try:
            while True:
                self._calls.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the run is over: nobody reads a result

    def _beat(self) -> None:
        while True:
            self._send("beat", 0, None)
            time.sleep(BEAT_SECONDS)

    def _send(self, kind: str, number: int, value: object) -> None:
        data = pickle.dumps((kind, number, value), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(0)


def ignore_signals() -> None:
    """Schedulers signal every process of a job: the run's own one decides."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Arguments: the number of the socket's file, what the worker is called, and what `WorkerObjects.join` needs, as JSON."""
    fd, role, join = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ignore_signals()
    if join["rank"] > 0 or role != "rank":
        sys.stdout = open(os.devnull, "w")  # what all ranks would say is said once
    SocketWorker(Connection(fd)).run(join)


if __name__ == "__main__":
    main()
