"""Verifiers in worker processes that can be killed: a response on which its verifier hangs or crashes gets score 0.

Pebble's pool (5.2.3) is not used: its stuck workers outlive a trainer killed by SIGKILL, and children of a killed
worker stay. With the start methods spawn and forkserver a script without a main guard gets no worker."""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.environments.verifier_process import Reply, Request

_START_SECONDS = 300.0
_END_SECONDS = 5.0  # for the kernel to end a killed process
_SEND_SECONDS = 10  # for an idle process to take a request
_SLICE = 0.5  # seconds per wait, between which Python raises the exception of a signal


class WorkerProcess:
    """A worker process that runs `verifier_process`. It is started by exec in a new session, so it shares no thread,
    lock or file with this process, and is killed together with all its children."""

    def __init__(self, target: str, options: Mapping[str, object]) -> None:
        self._errors = tempfile.TemporaryFile()
        self._connection, theirs = multiprocessing.Pipe()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        with theirs:  # the worker's standard input is a pipe that closes when this process ends
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nemo_rl_cpp.environments.verifier_process", target, json.dumps(options)],
                stdin=subprocess.PIPE, stdout=theirs.fileno(), stderr=self._errors, start_new_session=True,
                env={**os.environ, **worker_environment(1)},
            )  # fmt: skip
        self.pid = self._process.pid
        self._ready = False

    def ask(self, request: Request, seconds: float) -> Reply:
        """Return the reply to a request. Raise TimeoutError after `seconds`, EOFError if the process has ended, and
        RuntimeError, with its error output, if it could not start."""
        if not self._ready:
            self._wait_until_ready()
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError:  # the process has ended, is being killed, or does not read
            raise EOFError from None
        return json.loads(self._receive(seconds))

    def _wait_until_ready(self) -> None:
        try:
            self._receive(_START_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"a verifier process was not ready within {_START_SECONDS:.0f} s") from None
        except EOFError:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")[-2000:].strip()
            raise RuntimeError(f"a verifier process could not start: {text or 'no message'}") from None
        self._ready = True

    def _receive(self, seconds: float) -> bytes:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv_bytes()
        except OSError:
            raise EOFError from None
        raise TimeoutError

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process blocked in the kernel ends later
            self._process.wait(timeout=_END_SECONDS)
        for file in (self._connection, self._process.stdin, self._errors):
            file.close()


@dataclass
class Verdicts:
    """The results of one call of `VerifierPool.verify`, in the order of the responses."""

    scores: list[float]  # [B], 0 if the verifier failed
    answers: list[str | None]  # [B], the extracted answers; None for a response without an answer
    timed_out: int = 0  # the number of responses whose worker missed its deadline and was killed
    crashed: int = 0  # the number of responses whose worker ended by itself (for instance, out of memory)
    oversized: int = 0  # the number of responses longer than the limit, which no worker reads
    unmatchable: int = 0  # the number of responses whose ground truth no response can match


class VerifierPool:
    """Worker processes that score responses with a verifier class. They start in the background. A worker that misses a
    deadline or ends is replaced. All are killed by `shutdown`, when the pool is garbage-collected, or when the program
    ends."""

    def __init__(self, verifier: type, cfg: VerifierPoolConfig, warm_up: Mapping[str, object] | None = None) -> None:
        """Start `cfg.num_workers` processes, but at most one per core, or two on a single core. Each calls the
        verifier's method `warm_up` with the arguments `warm_up`."""
        self._target = f"{verifier.__module__}:{verifier.__qualname__}"
        self._shortcut = getattr(verifier, "shortcut", None)
        self.cfg = cfg
        self._options = {"memory_mb": cfg.verifier_memory_mb, "warm_up": warm_up or {}}
        self._lock = threading.Lock()
        size = min(cfg.num_workers, max(2, os.cpu_count() or 1))
        self._workers = [WorkerProcess(self._target, self._options) for _ in range(size)]
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def verify(self, responses: list[str], ground_truths: Sequence[object], **kwargs: object) -> Verdicts:
        """Score every response against its ground truth. `kwargs` are passed to the verifier. Raise RuntimeError if
        workers cannot start, and ValueError if the verifier is used incorrectly."""
        verdicts = Verdicts([0.0] * len(responses), [None] * len(responses))
        waiting: deque[int] = deque()
        for i, (response, truth) in enumerate(zip(responses, ground_truths)):
            if len(response) > self.cfg.max_answer_chars:
                verdicts.oversized += 1
            elif self._shortcut is not None and (verdict := self._shortcut(response, truth, **kwargs)) is not None:
                verdicts.scores[i], verdicts.answers[i] = verdict
            else:
                waiting.append(i)
        if not waiting:
            return verdicts
        with self._lock:
            replies: dict[int, Reply | str] = {}

            def work(place: int) -> None:
                with contextlib.suppress(IndexError):
                    while True:
                        i = waiting.popleft()
                        replies[i] = self._judge(place, (responses[i], ground_truths[i], kwargs))

            count = min(len(self._workers), len(waiting))
            with ThreadPoolExecutor(count) as threads:
                calls = [threads.submit(work, place) for place in range(count)]
                try:
                    while wait(calls, _SLICE).not_done:
                        pass
                    for call in calls:
                        call.result()
                except BaseException as error:
                    waiting.clear()
                    if not isinstance(error, Exception):  # Ctrl-C: later calls would get the replies of busy workers
                        for place in range(count):
                            self._replace(place)
                    raise
        for i, reply in replies.items():
            if isinstance(reply, dict):
                verdicts.scores[i], verdicts.answers[i] = reply["score"], reply["answer"]
                verdicts.unmatchable += reply["unmatchable"]
            else:
                verdicts.timed_out += reply == "timed_out"
                verdicts.crashed += reply == "crashed"
        return verdicts

    def _judge(self, place: int, request: Request) -> Reply | str:
        """Return a worker's reply, or "timed_out" or "crashed" if the worker had to be replaced."""
        worker = self._workers[place]
        try:
            reply = worker.ask(request, self.cfg.verifier_deadline_s)
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
            self._finalizer()

    def _replace(self, place: int) -> None:
        worker, self._workers[place] = self._workers[place], WorkerProcess(self._target, self._options)
        worker.kill()


def _kill_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
