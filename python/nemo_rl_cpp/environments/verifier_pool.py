"""Verifiers in processes that can be killed: a response that hangs or crashes its verifier scores 0, and work continues."""

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_cpp.config.env import VerifierPoolConfig
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


DEFAULT_DEADLINE_S = 5.0
DEFAULT_MEMORY_MB = 2048
DEFAULT_MAX_ANSWER_CHARS = 1_000_000
_START_SECONDS = 300.0


@dataclass
class Verdicts:
    """Results of one call, in the order of the responses.

    Attributes:
        scores: [B], 0 where the verifier gave up.
        answers: [B] the answers found, None where there is none.
        timed_out: responses whose worker missed its deadline and was killed.
        crashed: responses whose worker ended by itself (out of memory, for instance).
        oversized: responses longer than the limit, which no worker looks at.
        unmatchable: responses whose truth no response can match.
    """

    scores: list[float]
    answers: list[str | None]
    timed_out: int = 0
    crashed: int = 0
    oversized: int = 0
    unmatchable: int = 0


@dataclass
class PoolOptions:
    """How a pool runs its workers.

    Attributes:
        num_workers: processes at most; there are no more than the machine has cores (but two).
        deadline_s: seconds for one response, after which its worker is killed.
        memory_mb: address space a worker may take beyond what it starts with; None for no limit.
        max_answer_chars: longer responses score 0 unread.
    """

    num_workers: int = 1
    deadline_s: float = DEFAULT_DEADLINE_S
    memory_mb: int | None = DEFAULT_MEMORY_MB
    max_answer_chars: int = DEFAULT_MAX_ANSWER_CHARS

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers}; at least 1 verifier process is needed")
        if not self.deadline_s > 0:
            raise ValueError(f"verifier_deadline_s is {self.deadline_s}; it must be positive")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise ValueError(f"verifier_memory_mb is {self.memory_mb}; it must be positive, or null for no limit")
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars is {self.max_answer_chars}; it must be positive")

    @classmethod
    def from_config(cls, cfg: VerifierPoolConfig) -> "PoolOptions":
        """From an environment's section."""
        return cls(cfg.num_workers, cfg.verifier_deadline_s, cfg.verifier_memory_mb, cfg.max_answer_chars)


class VerifierPool:
    """Judges responses with a verifier class in worker processes.

    The processes start at once and are ready when the first call needs them. A worker that misses its deadline or
    ends is replaced. `shutdown`, the end of the program and the pool's own end kill them all.
    """

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
        self._size = min(options.num_workers, max(2, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._workers: list[WorkerProcess] = []
        self._closed = False
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        while len(self._workers) < self._size:
            self._start_worker()

    def verify(self, responses: list[str], ground_truths: Sequence[object], **kwargs: object) -> Verdicts:
        """Judges every response against its truth; `kwargs` go to the verifier.

        Raises RuntimeError when workers cannot start, with what they wrote, or after `shutdown`.
        """
        verdicts = Verdicts([0.0] * len(responses), [None] * len(responses))
        waiting: deque[int] = deque()
        for i, (response, truth) in enumerate(zip(responses, ground_truths)):
            if len(response) > self.options.max_answer_chars:
                verdicts.oversized += 1
            elif self._shortcut is not None and (verdict := self._shortcut(response, truth, **kwargs)) is not None:
                verdicts.scores[i], verdicts.answers[i] = verdict
            else:
                waiting.append(i)
        if waiting:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the verifier pool has been shut down")
                run = _Run(self, responses, ground_truths, kwargs, waiting, verdicts)
                try:
                    run.to_end()
                except BaseException:  # Ctrl-C: whoever is at work would answer to the wrong question later
                    for worker in [w for w in self._workers if w.task is not None]:
                        self._replace(worker)
                    raise
        return verdicts

    def shutdown(self) -> None:
        """Kills all workers. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def _start_worker(self) -> None:
        self._workers.append(WorkerProcess(self._target, self._worker_options))

    def _replace(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.remove(worker)
        self._start_worker()


@dataclass
class _Run:
    """One call of `verify`: responses wait, are given to free workers, and come back as verdicts."""

    pool: VerifierPool
    responses: list[str]
    truths: Sequence[object]
    kwargs: dict[str, object]
    waiting: deque[int]
    verdicts: Verdicts
    at_work: int = 0
    started: float = field(default_factory=time.monotonic)

    def to_end(self) -> None:
        while self.waiting or self.at_work:
            self._hand_out()
            workers = self.pool._workers
            now = time.monotonic()
            soonest = min((w.deadline for w in workers if w.task is not None), default=now + 1.0)
            for worker in wait_for_any(list(workers), max(0.0, min(soonest - now, 1.0))):
                self._listen(worker)
            self._enforce_deadlines()

    def _hand_out(self) -> None:
        for worker in self.pool._workers:
            if not self.waiting:
                return
            if worker.ready and worker.task is None:
                i = self.waiting.popleft()
                request = self.responses[i], self.truths[i], self.kwargs
                worker.start_task(i, request, self.pool.options.deadline_s)
                self.at_work += 1

    def _listen(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.receive()
        except EOFError:
            self._ended(worker)
            return
        for message in messages:
            if "ready" in message:
                worker.ready = True
            elif "error" in message:
                self._free(worker)
                raise ValueError(f"the verifier {self.pool._target} failed: {message['error']}")
            elif worker.task is not None:
                self.verdicts.scores[worker.task] = message["score"]
                self.verdicts.answers[worker.task] = message["answer"]
                self.verdicts.unmatchable += message.get("unmatchable", 0)
                self._free(worker)

    def _ended(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            raise RuntimeError(f"a verifier process could not start: {worker.error_text().strip() or 'no message'}")
        if worker.task is not None:
            self.verdicts.crashed += 1
            self._free(worker)
        self.pool._replace(worker)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self.pool._workers if w.task is not None and now >= w.deadline]:
            self.verdicts.timed_out += 1
            self._free(worker)
            self.pool._replace(worker)
        if now - self.started > _START_SECONDS and not any(w.ready for w in self.pool._workers):
            raise RuntimeError(f"no verifier process was ready within {_START_SECONDS:.0f} s")

    def _free(self, worker: WorkerProcess) -> None:
        worker.task = None
        worker.deadline = float("inf")
        self.at_work -= 1


class RemoteVerifier:
    """One verifier in a worker process, with the verifier's own `verify`."""

    def __init__(self, verifier: type, **options: float | None) -> None:
        self._pool = VerifierPool(verifier, PoolOptions(**options))

    def verify(
        self, pred_responses: list[str], ground_truths: Sequence[object], return_extracted_answer: bool = False, **kwargs: object
    ) -> list[float] | tuple[list[float], list[str | None]]:  # fmt: skip
        """As the verifier's; a response that takes too long scores 0."""
        verdicts = self._pool.verify(pred_responses, ground_truths, **kwargs)
        return (verdicts.scores, verdicts.answers) if return_extracted_answer else verdicts.scores

    def shutdown(self) -> None:
        """Kills the worker process."""
        self._pool.shutdown()


def _kill_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
