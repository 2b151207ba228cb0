"""Worker processes of a run, forked from a process that has imported torch, so that each starts in a moment.

`in_place(patch)` makes `ProcessWorker` fork a worker instead of starting a program. In all other respects the worker is
the same: a child of this process, in a separate session, with this process's environment, working directory and module
paths. tests/unit/distributed/test_process_workers.py tests that a worker can be started as a program."""

import atexit
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

IMPORTED = (
    "torch.distributed", "nemo_rl_cpp.distributed.worker", "nemo_rl_cpp.distributed.ranks", "nemo_rl_cpp.algorithms.build",
    "nemo_rl_cpp.models.policy.lm_policy", "nemo_rl_cpp.models.generation.native",
)  # fmt: skip
OF_TRANSFORMERS = (
    "transformers.modeling_utils", "torch.distributed.fsdp", "nemo_rl_cpp.models.hf.trained",
)  # fmt: skip
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process


class Forked:
    """A forked worker, with the part of `subprocess.Popen` that `ProcessWorker` uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode, self._lock = pid, None, threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            ended = None if self.returncode is not None else os.pidfd_open(self.pid)
        if ended is not None:
            ready, _, _ = select.select([ended], [], [], timeout)
            os.close(ended)
            if not ready:
                raise subprocess.TimeoutExpired("worker", timeout)
        return self.poll()


class Forker:
    """The process that forks the workers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def start(self, command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: object) -> Forked:
        """Fork a worker. `command` is a worker's command line, whose first argument is the number of its socket."""
        at = command.index("nemo_rl_cpp.distributed.worker") + 1
        more = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
        more += OF_TRANSFORMERS if "transformers" in sys.modules else ()
        asked = pickle.dumps((command[at:], env, os.getcwd(), more))
        prctl = ctypes.CDLL(None).prctl
        prctl(SUBREAPER, 1)
        try:
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "big")], [pass_fds[0], 1, 2])
            self._socket.sendall(asked)
            answer = self._socket.recv(4, socket.MSG_WAITALL)
            if len(answer) < 4:  # pid 0 would make waitpid reap any child
                raise ChildProcessError("the process that forks workers has ended: this one was not started")
            return Forked(int.from_bytes(answer, "big"))
        finally:
            prctl(SUBREAPER, 0)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=20)


_forker: Forker | None = None


def in_place(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers until `patch` is undone."""
    from nemo_rl_cpp.distributed import launch

    global _forker
    if _forker is None:
        _forker = Forker()
        atexit.register(_forker.close)
    patch.setattr(launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _forker.start}))


def serve(requests: socket.socket) -> None:
    """Fork a worker for each request, until the other end is closed. The worker's parent ends at once."""
    for name in IMPORTED:
        importlib.import_module(name)
    while True:
        size, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not size:
            return
        asked = requests.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        arguments, environment, folder, more = pickle.loads(asked)
        for name in more:  # the workers need the modules that the test has imported
            importlib.import_module(name)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(writing, child.to_bytes(4, "big"))
                os._exit(0)
            requests.close(), os.close(reading), os.close(writing)
            work(arguments, environment, folder, files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)
        requests.sendall(os.read(reading, 4))
        os.close(reading), os.close(writing)


def work(arguments: list[str], environment: dict[str, str], folder: str, files: list[int]) -> None:
    """Run as a worker. Never returns."""
    status = 1
    try:
        os.setsid()
        for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (files[1], 1), (files[2], 2)):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
        sys.argv = ["worker", str(files[0]), *arguments[1:]]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        importlib.import_module("nemo_rl_cpp.distributed.worker").main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
