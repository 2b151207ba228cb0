"""A run of one program in the sandbox, which is stopped when it reaches a limit."""

import os
import resource
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_cpp.environments.sandbox import inside

_SETUP_SECONDS = 30.0
_INTERPRETER_MB = 32
_MB = 2**20
_DESCRIPTORS = 32  # open files; as pipes and sockets they hold at most 12 MB


class SandboxUnavailableError(RuntimeError):
    """Raised if this machine lacks a protection that untrusted programs need. The message names the protection."""


@dataclass(frozen=True)
class Limits:
    """The limits for one run of a program, which is a single process."""

    time_s: float = 5.0  # wall-clock seconds; the processor time has the same limit
    # address space and folder together. The folder gets `folder_mb`, the address space the rest. The kernel enforces
    # both.
    memory_mb: int = 512
    threads: int = 8  # concurrent threads
    output_kb: int = 1024  # maximum size of standard output and standard error together
    folder_mb: int = 32  # size of the program's folder, which is in memory

    def __post_init__(self) -> None:
        least = self.folder_mb + _INTERPRETER_MB
        if self.memory_mb < least:
            needed = f"{least}: folder_mb, and {_INTERPRETER_MB} for a Python interpreter"
            raise ValueError(f"memory_mb is {self.memory_mb}; the least is {needed}")

    def apply(self, other_processes: int) -> None:
        """Set the kernel's limits on this process, except that on memory. `other_processes` is how many other processes
        the user may have; the kernel's limit counts all processes and threads of a user."""
        _lower(resource.RLIMIT_CPU, int(self.time_s) + 1)
        _lower(resource.RLIMIT_NPROC, self.threads + other_processes)
        _lower(resource.RLIMIT_FSIZE, self.folder_mb * _MB)
        _lower(resource.RLIMIT_NOFILE, _DESCRIPTORS)
        _lower(resource.RLIMIT_SIGPENDING, 1024)
        for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
            _lower(kind, 0)
        os.nice(5)  # the training run has priority

    def apply_memory(self) -> None:
        """Limit this process's address space. Call this right before exec: the process may exceed the limit before."""
        _lower(resource.RLIMIT_AS, (self.memory_mb - self.folder_mb) * _MB)


def _lower(kind: int, limit: int) -> None:
    _, most = resource.getrlimit(kind)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, limit))


@dataclass
class Outcome:
    """The result of running a program in the sandbox."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None  # a negative number is the signal that ended the program; None: it was stopped
    stopped: str | None = None  # why it was stopped: "time_limit", "output_limit" or "forbidden_call"; None: it was not
    detail: str = ""  # the limit that was reached
    seconds: float = 0.0


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, files: dict[str, bytes] | None = None
) -> Outcome:
    """Run the Python code `source` in the sandbox, with `files` (name -> contents) in its folder; leave no process. The
    caller must have only one thread, because it forks. Raise SandboxUnavailableError if there is no sandbox."""
    run, program = _Run(limits or Limits()), source.encode("utf-8", "surrogatepass")
    try:
        run.start({**(files or {}), "main.py": program}, stdin.encode("utf-8", "surrogatepass"))
        run.watch()
    finally:
        run.end()
    return run.outcome


@dataclass
class _Run:
    limits: Limits
    outcome: Outcome = field(default_factory=Outcome)
    keeper: int = 0
    first: int = 0  # the first process inside, by its pid outside
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
        job = inside.Job(inside.interpreter(), files, self.limits, stdin_file, out, err, status, go)
        caller = os.getpid()
        self.keeper = os.fork()
        if self.keeper == 0:
            inside.guarded(job, lambda job: inside.keeper(job, caller))
        for descriptor in (out, err, status, go, stdin_file):
            os.close(descriptor)
        self.began = time.monotonic()
        self.deadline = self.began + _SETUP_SECONDS

    def watch(self) -> None:
        """Wait until all processes in the sandbox have ended. Stop the program when it reaches a limit."""
        poll = select.poll()
        for descriptor in self.streams:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)
        open_streams = set(self.streams)
        while open_streams:
            for descriptor, _ in poll.poll(1000 * max(self.deadline - time.monotonic(), 0.0)):
                if not self._read(descriptor):
                    poll.unregister(descriptor)
                    open_streams.discard(descriptor)
            if self.outcome.stopped is None and not self.finished:
                self._enforce()
            if self.outcome.stopped is not None or self.finished or self.failure:
                self.deadline = time.monotonic() + 1  # time for the run to end
        self.outcome.seconds = time.monotonic() - self.began

    def _enforce(self) -> None:
        if self._printed > 1024 * self.limits.output_kb:
            self._stop("output_limit", f"more than {self.limits.output_kb} kB")
        elif time.monotonic() >= self.deadline and self.started:
            self._stop("time_limit", f"{self.limits.time_s:g} s")
        elif time.monotonic() >= self.deadline:
            self.failure = self.failure or "its processes did not start in time"
            self._kill()

    @property
    def _printed(self) -> int:
        return len(self.streams[self.stdout]) + len(self.streams[self.stderr])

    def _read(self, descriptor: int) -> bool:
        """Read the bytes that are available from a stream of the program. Return False at the stream's end."""
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
        """Handle a line that a process in the sandbox has written about its state."""
        word, _, rest = line.partition(" ")
        if word == "unshared":
            self._name_users()
        elif word == "pid":
            self.first = int(rest)
        elif word == "started":
            self.started = True
            self.began = time.monotonic()  # the program's time starts
            self.deadline = self.began + self.limits.time_s
        elif word == "failed":
            self.failure = self.failure or rest
        else:
            self.finished = True
            if int(rest) == -signal.SIGSYS:
                self.outcome.stopped = "forbidden_call"
            elif self.outcome.stopped is None:
                self.outcome.exit_code = int(rest)

    def _name_users(self) -> None:
        """Map the user inside the sandbox to nobody if this process runs as root, for whom the kernel's limits do not
        apply, and otherwise to the user of this process."""
        program, uid, gid = inside.PROGRAM_USER, os.getuid(), os.getgid()
        folder = Path(f"/proc/{self.keeper}")
        try:
            try:
                if uid != 0:
                    raise PermissionError
                for name in ("uid_map", "gid_map"):
                    (folder / name).write_text(f"0 0 1\n{program} {program} 1\n")
            except PermissionError:
                (folder / "uid_map").write_text(f"{program} {uid} 1\n")
                (folder / "setgroups").write_text("deny")
                (folder / "gid_map").write_text(f"{program} {gid} 1\n")
            os.write(self.go, b"x")
        except OSError as error:
            self.failure = f"mapping users: {error}"
            self._kill()

    def _stop(self, reason: str, detail: str) -> None:
        self.outcome.stopped, self.outcome.detail = reason, detail
        self._kill()

    def _kill(self) -> None:
        """Kill the first process in the sandbox, or if there is none yet, the process that builds the sandbox. The kernel
        then kills all other processes of the sandbox."""
        with suppress(ProcessLookupError):
            os.kill(self.first or self.keeper, signal.SIGKILL)

    def end(self) -> None:
        """End the run's processes and close its descriptors. Raise SandboxUnavailableError if no sandbox was built."""
        if self.keeper:
            if not self.finished or self.outcome.stopped:
                self._kill()
            os.waitpid(self.keeper, 0)
        for descriptor in (*self.streams, self.go):
            os.close(descriptor)
        self.outcome.stdout, self.outcome.stderr = bytes(self.streams[self.stdout]), bytes(self.streams[self.stderr])
        if self.failure:
            raise SandboxUnavailableError(f"the code sandbox could not be built: {self.failure}")


def _read_only_file(contents: bytes) -> int:
    """Return a read-only descriptor of an in-memory file with these contents."""
    writable = os.memfd_create("stdin")
    try:
        view = memoryview(contents)
        while view:
            view = view[os.write(writable, view) :]
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
