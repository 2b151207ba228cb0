"""A worker process that can be killed, as the caller sees it."""

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from nemo_rl_cpp.environments.verifier_process import HEADER, Reply, Request

_END_SECONDS = 5.0  # for the kernel to end a killed process


class WorkerProcess:
    """Starts `verifier_process` and talks to it without ever blocking on it.

    The process is started by exec, not by fork, in a session of its own: it shares no thread, lock or file with this
    one, and it is killed together with whatever it may have started.
    """

    def __init__(self, target: str, options: Mapping[str, object]) -> None:
        self._errors = tempfile.TemporaryFile()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nemo_rl_cpp.environments.verifier_process", target, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        os.set_blocking(self.stdin.fileno(), False)
        self._incoming = bytearray()
        self._outgoing = memoryview(b"")
        self.ready = False
        self.task: int | None = None
        self.deadline = float("inf")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        return len(self._outgoing) > 0

    def start_task(self, task: int, request: Request, deadline_s: float) -> None:
        """Hands over a request; the deadline counts from now."""
        payload = pickle.dumps(request)
        self._outgoing = memoryview(HEADER.pack(len(payload)) + payload)
        self.task = task
        self.deadline = time.monotonic() + deadline_s
        self.flush()

    def flush(self) -> None:
        """Writes as much as the pipe takes."""
        try:
            while self._outgoing:
                written = os.write(self.stdin.fileno(), self._outgoing)
                self._outgoing = self._outgoing[written:]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has died; reading says so
            self._outgoing = memoryview(b"")

    def receive(self) -> list[Reply]:
        """Messages that have come in; EOFError when the process has ended."""
        try:
            while chunk := os.read(self.stdout.fileno(), 1 << 20):
                self._incoming += chunk
            ended = True
        except BlockingIOError:
            ended = False
        messages = []
        while len(self._incoming) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(json.loads(self._incoming[HEADER.size : end]))
            del self._incoming[:end]
        if ended and not messages:
            raise EOFError
        return messages

    def error_text(self) -> str:
        """The end of what it wrote to standard error before it was ready."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def kill(self) -> None:
        """Kills the process with all its children and collects it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel does not let go ends later
            self._process.wait(timeout=_END_SECONDS)
        for stream in (self.stdin, self.stdout, self._errors):
            try:
                stream.close()
            except OSError:
                pass


def wait_for_any(workers: list[WorkerProcess], timeout: float | None) -> list[WorkerProcess]:
    """The workers that have something to say (or have ended); writes on to those that are still reading."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
            if worker.wants_to_write:
                selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        readable = []
        for key, events in selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            else:
                readable.append(key.data)
        return readable
