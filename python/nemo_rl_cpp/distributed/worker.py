"""One process of a run. It makes objects and calls their methods, as the run's own process asks through a socket.

Started by `ProcessWorker` as `python -m nemo_rl_cpp.distributed.worker`. It ends when the socket is closed, whatever it is
doing: a run that was killed leaves no process behind.
"""

import json
import os
import pickle
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection

BEAT_SECONDS = 1.0  # between two signs of life


class Worker:
    """Answers the calls of one socket, one after the other."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._calls: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._objects: dict[int, object] = {}
        self._name = f"rank {rank} of {size}"
        self._ranks = None

    def run(self, join: dict) -> None:
        """Meets the other ranks, then answers until the socket is closed."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self._answer(-1, lambda: self._join(join))
        while True:
            number, target, method, payload, event = self._calls.get()
            self._answer(number, lambda: self._call(number, target, method, payload, event))

    def _join(self, join: dict) -> int:
        import torch

        from nemo_rl_cpp.distributed.ranks import connect

        torch.set_num_threads(join.pop("threads"))
        self._ranks = connect(**join)
        return os.getpid()

    def _call(self, number: int, target: int, method: str, payload: bytes, event: str | None) -> object:
        args, kwargs = pickle.loads(payload)
        if method == "__create__":
            self._objects[target] = args[0](self._ranks)
            return None
        if method == "__delete__":
            return self._objects.pop(target, None) and None
        if event is not None:
            kwargs[event] = lambda *told: self._send("event", number, told)
        found = getattr(self._objects[target], method)
        return found(*args, **kwargs) if callable(found) else found

    def _answer(self, number: int, call) -> None:
        try:
            value = call()
        except BaseException as error:  # it belongs to the one who asked
            text = "".join(traceback.format_exception(error))
            self._send("error", number, (_picklable(error), text))
        else:
            self._send("value", number, value)

    def _read(self) -> None:
        try:
            while True:
                self._calls.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the run is over: nobody reads a result

    def _beat(self) -> None:
        while True:
            self._send("beat", 0, None)
            threading.Event().wait(BEAT_SECONDS)

    def _send(self, kind: str, number: int, value: object) -> None:
        data = pickle.dumps((kind, number, value), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(0)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Arguments: the number of the socket's file, and what `ranks.connect` needs, as JSON."""
    fd, join = int(sys.argv[1]), json.loads(sys.argv[2])
    if join["rank"] > 0:
        sys.stdout = open(os.devnull, "w")  # what all ranks would say is said once
    Worker(Connection(fd), join["rank"], join["size"]).run(join)


if __name__ == "__main__":
    main()
