"""A worker process. It creates objects and calls their methods, as the run's main process requests through a socket.

`ProcessWorker` starts it as `python -m nemo_rl_cpp.distributed.worker`. It exits once the socket is closed, even in
the middle of a call, so that a killed run leaves no process behind."""

import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed.worker_calls import Answer, picklable
from nemo_rl_cpp.errors import in_user_code

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.ranks import Ranks

BEAT_SECONDS = 1.0  # seconds between two heartbeats


@dataclass
class WorkerObjects:
    """The Python objects in one worker. Arguments of calls arrive pickled; an exception is returned to the caller."""

    _objects: dict[int, object] = field(default_factory=dict)
    _ranks: "Ranks | None" = None

    def join(self, threads: int, **meeting: object) -> Answer:
        """Set the number of threads, and join the rendezvous of the ranks: `ranks.connect(**meeting)`."""

        def make() -> None:
            import torch

            from nemo_rl_cpp.distributed.ranks import connect

            torch.set_num_threads(threads)
            self._ranks = connect(**meeting)

        return answer(make)

    def call(
        self, target: int, method: str, payload: bytes, event: str | None = None, tell: Callable | None = None
    ) -> Answer:
        """Call `method` of object number `target` with `payload`, the pickled (args, kwargs), and return its value or
        its error. If `method` names an attribute that cannot be called, return the attribute. The name `__create__`
        creates object number `target` instead, as args[0](ranks). Unless `event` is None, the method also gets the
        callback `tell` as its argument named `event`."""

        def make() -> object:
            args, kwargs = pickle.loads(payload)
            if method == "__create__":
                self._objects[target] = args[0](self._ranks)
                return None
            if event is not None:
                kwargs[event] = tell
            found = getattr(self._objects[target], method)
            return found(*args, **kwargs) if callable(found) else found

        return answer(make)


def answer(make: Callable[[], object]) -> Answer:
    """Call `make` and return an Answer with its result, or with the exception that it raised."""
    try:
        return Answer(make())
    except BaseException as error:
        told = in_user_code(error)  # the line in the user's code is known only in this process
        trace = "".join(traceback.format_exception(error))
        return Answer(None, picklable(error), trace, None if told is None else str(told))


def worker_environment(threads: int) -> dict[str, str]:
    """Return a worker's environment variables: the module search path of this process, and the number of threads."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


class SocketWorker:
    """A worker process that answers, in order, the calls that arrive at one socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._calls: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._objects = WorkerObjects()

    def run(self, join: dict) -> None:
        """Join the rendezvous of the ranks (`WorkerObjects.join`), then answer calls until the socket closes."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self._send("answer", -1, self._objects.join(**join))
        while True:
            number, target, method, payload, event = self._calls.get()
            tell = partial(self._tell, number)
            self._send("answer", number, self._objects.call(target, method, payload, event, tell))

    def _tell(self, number: int, *told: object) -> None:
        self._send("event", number, told)

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
    """Ignore the signals that schedulers send to all processes of a job: the run's main process handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run a worker. Its arguments: a socket's file descriptor, the role, and those of `WorkerObjects.join` as JSON."""
    fd, role, join = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ignore_signals()
    if join["rank"] > 0 or role != "rank":
        sys.stdout = open(os.devnull, "w")  # rank 0 prints what all ranks would print
    SocketWorker(Connection(fd)).run(join)


if __name__ == "__main__":
    main()
