"""Runs one program in a sandbox, and watches it from outside."""

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from nemo_rl_cpp.environments.sandbox import supervisor
from nemo_rl_cpp.environments.sandbox.files import interpreter
from nemo_rl_cpp.environments.sandbox.limits import Limits

_LOOK_SECONDS = 0.005
_PAGE_TABLES = 1 / 32  # of `memory_mb`; a program that scatters its pages needs more, any other some 1/500
_SETUP_SECONDS = 30.0


class SandboxUnavailableError(RuntimeError):
    """This machine lacks a protection that untrusted programs need; the message says which."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: of the program; negative: the signal that ended it; None: it was stopped.
        stopped: why it was stopped: "time_limit", "memory_limit", "output_limit", "forbidden_call"; None: it was not.
        detail: the forbidden call's name, or what was too much.
        most_threads: threads seen at the same time.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None
    stopped: str | None = None
    detail: str = ""
    seconds: float = 0.0
    most_threads: int = 0


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, files: dict[str, bytes] | None = None
) -> Outcome:
    """Runs Python code with `stdin`, and `files` beside it in its folder; when this returns, no process of it is left.

    The calling process must have one thread only (it forks). Raises SandboxUnavailableError when the sandbox cannot be
    built: the program then has not run at all.
    """
    run = _Run(limits or Limits())
    try:
        run.start(
            {**(files or {}), "main.py": source.encode("utf-8", "surrogatepass")},
            stdin.encode("utf-8", "surrogatepass"),
        )
        run.watch()
    finally:
        run.end()
    return run.outcome


@dataclass
class _Run:
    limits: Limits
    outcome: Outcome = field(default_factory=Outcome)
    keeper: int = 0
    first: int = 0  # the first process inside, by its number outside
    program: int = 0  # its child, from when it has started
    streams: dict[int, bytearray] = field(default_factory=dict)
    failure: str = ""
    started: bool = False
    finished: bool = False
    began: float = 0.0
    deadline: float = 0.0

    def start(self, files: dict[str, bytes], stdin: bytes) -> None:
        (self.stdout, out), (self.stderr, err), (self.status, status), (go, self.go) = (os.pipe() for _ in range(4))
        self.streams = {self.stdout: bytearray(), self.stderr: bytearray(), self.status: bytearray()}
        stdin_file = _read_only_file(stdin)
        job = supervisor.Job(interpreter(), files, self.limits, stdin_file, out, err, status, go)
        caller = os.getpid()
        self.keeper = os.fork()
        if self.keeper == 0:
            supervisor._guarded(job, lambda job: supervisor.keeper(job, caller))
        for descriptor in (out, err, status, go, stdin_file):
            os.close(descriptor)
        self.began = time.monotonic()
        self.deadline = self.began + _SETUP_SECONDS

    def watch(self) -> None:
        """Until everything inside has ended, or a limit is reached."""
        poll = select.poll()
        for descriptor in self.streams:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)
        look = self.began + _LOOK_SECONDS
        open_streams = set(self.streams)
        while open_streams:
            for descriptor, _ in poll.poll(1000 * max(look - time.monotonic(), 0.0)):
                if not self._read(descriptor):
                    poll.unregister(descriptor)
                    open_streams.discard(descriptor)
            now = time.monotonic()
            if self.outcome.stopped is None and not self.finished:
                self._enforce(now >= self.deadline, now >= look)
            if now >= look:
                look = now + _LOOK_SECONDS
        self.outcome.seconds = time.monotonic() - self.began

    def _enforce(self, late: bool, look: bool) -> None:
        if look and self.program:
            threads, tables_kb = _threads_and_page_tables(self.program)
            self.outcome.most_threads = max(self.outcome.most_threads, threads)
            if tables_kb > 1024 * self.limits.memory_mb * _PAGE_TABLES:
                self._stop("memory_limit", f"{tables_kb / 1024:.0f} MB of page tables")
                return
        if self._printed > 1024 * self.limits.output_kb:
            self._stop("output_limit", f"more than {self.limits.output_kb} kB")
        elif late and not self.started:
            self.failure = self.failure or "its processes did not start in time"
            self._kill()
        elif late:
            self._stop("time_limit", f"{self.limits.time_s:g} s")

    @property
    def _printed(self) -> int:
        return len(self.streams[self.stdout]) + len(self.streams[self.stderr])

    def _read(self, descriptor: int) -> bool:
        """Takes what is there; false at the end of the stream."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        kept = self.streams[descriptor]
        if descriptor == self.status or self._printed <= 1024 * self.limits.output_kb:
            kept += chunk
        if descriptor == self.status:
            while b"\n" in kept:
                line, _, rest = kept.partition(b"\n")
                kept[:] = rest
                self._told(line.decode(errors="replace"))
        return bool(chunk)

    def _told(self, line: str) -> None:
        """A line of the processes inside."""
        word, _, rest = line.partition(" ")
        if word == "unshared":
            self._name_users()
        elif word == "pid":
            self.first = int(rest)
        elif word == "started":
            self.started = True
            self.program = _child_of(self.first)
            self.began = time.monotonic()  # the program's own time begins
            self.deadline = self.began + self.limits.time_s
        elif word == "failed":
            self.failure = self.failure or rest
        else:
            self.finished = True
            if word == "forbidden":
                self._stop("forbidden_call", rest)
            elif self.outcome.stopped is None:
                self.outcome.exit_code = int(rest) if word == "exit" else -int(rest)

    def _name_users(self) -> None:
        """Says which users outside the ones inside are: as root nobody (limits do not hold for root), else the caller."""
        inside, uid, gid = supervisor.PROGRAM_USER, os.getuid(), os.getgid()
        folder = f"/proc/{self.keeper}"
        try:
            try:
                if uid != 0:
                    raise PermissionError
                for name in ("uid_map", "gid_map"):
                    _write(f"{folder}/{name}", f"0 0 1\n{inside} {inside} 1\n")
            except PermissionError:
                _write(f"{folder}/uid_map", f"{inside} {uid} 1\n")
                _write(f"{folder}/setgroups", "deny")
                _write(f"{folder}/gid_map", f"{inside} {gid} 1\n")
            os.write(self.go, b"x")
        except OSError as error:
            self.failure = f"mapping users: {error}"
            self._kill()

    def _stop(self, reason: str, detail: str) -> None:
        self.outcome.stopped, self.outcome.detail = reason, detail
        self._kill()

    def _kill(self) -> None:
        # the program first, sooner than the kernel kills it on a busy machine; the keeper collects the first process, and ends
        for pid in (self.program, self.first or self.keeper):
            if pid:
                _kill_process(pid)

    def end(self) -> None:
        """Nothing is left, whatever happened."""
        if self.keeper:
            if not self.finished or self.outcome.stopped:
                self._kill()
            os.waitpid(self.keeper, 0)
        for descriptor in (*self.streams, self.go):
            os.close(descriptor)
        self.outcome.stdout, self.outcome.stderr = bytes(self.streams[self.stdout]), bytes(self.streams[self.stderr])
        if self.failure:
            raise SandboxUnavailableError(f"the code sandbox could not be built: {self.failure}")


def _child_of(pid: int) -> int:
    """Returns the only child; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return int(file.read() or 0)
    except OSError:
        return 0


def _threads_and_page_tables(pid: int) -> tuple[int, int]:
    """Returns how many threads a process has, and the size of its page tables in kB; 0 when it has ended."""
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return 0, 0
    for thread in threads:  # the first one may have ended while others go on
        with suppress(OSError), open(f"{folder}/{thread}/status") as status:
            if found := next((line for line in status if line.startswith("VmPTE:")), None):
                return len(threads), int(found.split()[1])
    return len(threads), 0


def _kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _read_only_file(contents: bytes) -> int:
    """A descriptor of a file in memory that can only be read."""
    writable = os.memfd_create("stdin")
    try:
        view = memoryview(contents)
        while view:
            view = view[os.write(writable, view) :]
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
