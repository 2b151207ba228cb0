"""Verifiers in worker processes that can be killed: a response on which its verifier hangs or crashes gets score 0."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.distributed.worker_calls import Future
from nemo_rl_cpp.environments.verifier_process import Reply, Request

_START_SECONDS = 300.0
_END_SECONDS = 5.0  # for the kernel to end a killed process


class WorkerProcess:
    """A worker process, which runs `verifier_process`, and the socket to it. It is started by exec in a new session, so
    it shares no thread, lock or file with this process, and is killed together with all its children."""

    def __init__(self, target: str, options: Mapping[str, object]) -> None:
        self._errors = tempfile.TemporaryFile()
        self._socket, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nemo_rl_cpp.environments.verifier_process", target, json.dumps(options)],
                stdin=theirs, stdout=theirs, stderr=self._errors, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.pid = self._process.pid
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until the process is ready. Raise RuntimeError, with the process's error output, if it cannot start."""
        if self._ready:
            return
        try:
            self._receive(time.monotonic() + _START_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"a verifier process was not ready within {_START_SECONDS:.0f} s") from None
        except EOFError:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-2000:].strip()
            raise RuntimeError(f"a verifier process could not start: {text or 'no message'}") from None
        self._ready = True

    def ask(self, request: Request, seconds: float) -> Reply:
        """Return the reply to a request. Raise TimeoutError after `seconds`, EOFError if the process has ended."""
        end = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(pickle.dumps(request))
        except TimeoutError:
            raise
        except OSError:  # the process has ended, or is being killed
            raise EOFError from None
        return self._receive(end)

    def _receive(self, end: float) -> Reply:
        received = bytearray()
        while not received.endswith(b"\n"):
            try:
                self._socket.settimeout(max(end - time.monotonic(), 1e-6))
                part = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                part = b""
            if not part:
                raise EOFError
            received += part
        return json.loads(received)

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process blocked in the kernel ends later
            self._process.wait(timeout=_END_SECONDS)
        with contextlib.suppress(OSError):  # wakes a thread that waits for a reply
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._errors.close()


@dataclass
class Verdicts:
    """The results of one call, in the order of the responses."""

    scores: list[float]  # [B], 0 if the verifier failed
    answers: list[str | None]  # [B], the extracted answers; None for a response without an answer
    timed_out: int = 0  # the number of responses whose worker missed its deadline and was killed
    crashed: int = 0  # the number of responses whose worker ended by itself (for instance, out of memory)
    oversized: int = 0  # the number of responses longer than the limit, which no worker reads
    unmatchable: int = 0  # the number of responses whose ground truth no response can match


@dataclass
class PoolOptions:
    """The settings of a pool's workers."""

    num_workers: int = 1  # the number of processes, at most the number of cores (on a single core, at most two)
    deadline_s: float = 5.0  # seconds per response, after which its worker is killed
    memory_mb: int | None = 2048  # address space that a worker may use beyond its size at the start; None for no limit
    max_answer_chars: int = 1_000_000  # a longer response gets score 0 unread

    @classmethod
    def from_config(cls, cfg: VerifierPoolConfig) -> "PoolOptions":
        return cls(cfg.num_workers, cfg.verifier_deadline_s, cfg.verifier_memory_mb, cfg.max_answer_chars)


class VerifierPool:
    """A pool of worker processes that score responses with a verifier class. They start in the background; the first
    call waits for them. A worker that misses its deadline or ends is replaced. All are killed by `shutdown`, at the end
    of the program, and when the pool is garbage-collected."""

    def __init__(self, verifier: type, options: PoolOptions, warm_up: Mapping[str, object] | None = None) -> None:
        if verifier.__module__ == "__main__" or "<locals>" in verifier.__qualname__:
            raise ValueError(
                f"the verifier {verifier.__qualname__} must be importable by worker processes: put it into a module"
            )
        self._target = f"{verifier.__module__}:{verifier.__qualname__}"
        self._shortcut = getattr(verifier, "shortcut", None)
        self.options = options
        self._worker_options = {
            "deadline_s": options.deadline_s,
            "memory_mb": options.memory_mb,
            "warm_up": warm_up or {},
        }
        self._lock = threading.Lock()
        self._closed = False
        size = min(options.num_workers, max(2, os.cpu_count() or 1))
        self._workers = [WorkerProcess(self._target, self._worker_options) for _ in range(size)]
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def verify(self, responses: list[str], ground_truths: Sequence[object], **kwargs: object) -> Verdicts:
        """Score every response against its ground truth. `kwargs` are passed to the verifier. Raise RuntimeError after
        `shutdown`, or if workers cannot start, and ValueError if the verifier reports a usage error."""
        verdicts = Verdicts([0.0] * len(responses), [None] * len(responses))
        waiting: deque[int] = deque()
        for i, (response, truth) in enumerate(zip(responses, ground_truths)):
            if len(response) > self.options.max_answer_chars:
                verdicts.oversized += 1
            elif self._shortcut is not None and (verdict := self._shortcut(response, truth, **kwargs)) is not None:
                verdicts.scores[i], verdicts.answers[i] = verdict
            else:
                waiting.append(i)
        if not waiting:
            return verdicts
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool has been shut down")
            replies: dict[int, Reply | str] = {}

            def work(place: int) -> None:
                self._workers[place].wait_until_ready()
                with contextlib.suppress(IndexError):
                    while True:
                        i = waiting.popleft()
                        replies[i] = self._judge(place, (responses[i], ground_truths[i], kwargs))

            self._in_threads(work, min(len(self._workers), len(waiting)), waiting)
        for i, reply in replies.items():
            if isinstance(reply, dict):
                verdicts.scores[i], verdicts.answers[i] = reply["score"], reply["answer"]
                verdicts.unmatchable += reply["unmatchable"]
            else:
                verdicts.timed_out += reply == "timed_out"
                verdicts.crashed += reply == "crashed"
        return verdicts

    def _in_threads(self, work: Callable[[int], None], count: int, waiting: deque[int]) -> None:
        """Run `work` for `count` workers, each in a thread, and raise the first exception."""
        results = [Future() for _ in range(count)]
        threads = [
            threading.Thread(target=result.run, args=(partial(work, place),), daemon=True)
            for place, result in enumerate(results)
        ]
        for thread in threads:
            thread.start()
        try:
            for result in results:
                result.result()
        except BaseException as error:
            waiting.clear()
            if not isinstance(error, Exception):  # Ctrl-C: later calls would get the replies of busy workers
                for place in range(count):
                    self._replace(place)
            raise
        finally:
            for thread in threads:
                thread.join()

    def _judge(self, place: int, request: Request) -> Reply | str:
        """Return the worker's reply, or "timed_out" or "crashed" if the worker had to be replaced."""
        worker = self._workers[place]
        worker.wait_until_ready()
        try:
            reply = worker.ask(request, self.options.deadline_s)
        except (TimeoutError, EOFError) as error:
            if self._workers[place] is worker:  # otherwise an interrupt has replaced the worker
                self._replace(place)
            return "timed_out" if isinstance(error, TimeoutError) else "crashed"
        if "error" in reply:
            raise ValueError(f"the verifier {self._target} failed: {reply['error']}")
        return reply

    def shutdown(self) -> None:
        """Kill all workers. Further calls do nothing."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def _replace(self, place: int) -> None:
        worker, self._workers[place] = self._workers[place], WorkerProcess(self._target, self._worker_options)
        worker.kill()


def _kill_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
