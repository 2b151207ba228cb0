"""Inside the sandbox: three processes, each started by the one before.

1. The keeper leaves the caller's namespaces and waits. When the caller dies, so does the keeper.
2. The first process of the new process namespace builds the file system and watches over the program. When it ends, for
   whatever reason, the kernel ends every process that the program has started.
3. The program.
"""

import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from nemo_rl_cpp.environments.sandbox import files, kernel, seccomp
from nemo_rl_cpp.environments.sandbox.limits import Limits

NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_TOLD_BYTES = 1 << 18  # smaller changes of what is held are not told
PROGRAM_USER = 65534
"""User and group of the program, inside its namespace."""


@dataclass(frozen=True)
class Job:
    """What to run, and the descriptors to talk through.

    Attributes:
        python: the interpreter, outside and inside.
        files: name in the folder -> contents; `main.py` is run.
        stdin, stdout, stderr: the program's own.
        status: where the processes above report, a line each.
        go: becomes readable when the caller has set who is who in the new namespace.
    """

    python: str
    files: dict[str, bytes]
    limits: Limits
    stdin: int
    stdout: int
    stderr: int
    status: int
    go: int


def keeper(job: Job, caller: int) -> NoReturn:
    """The first process; see the module."""
    os.setsid()  # signals to the program's process group must not reach the caller's
    _close_the_callers(job)
    kernel.unshare(NAMESPACES)
    kernel.die_with_parent()
    if os.getppid() != caller:
        os._exit(1)
    _report(job, "unshared")
    if not os.read(job.go, 1):
        os._exit(1)
    first = os.fork()
    if first == 0:
        _guarded(job, _first_process)
    _report(job, f"pid {first}")
    os.waitpid(first, 0)
    os._exit(0)


def _close_the_callers(job: Job) -> None:
    """The caller's own files are none of the sandbox's, and there may be more of them than a program may have open."""
    kept = {0, 1, 2, job.stdin, job.stdout, job.stderr, job.status, job.go}
    for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)


def _first_process(job: Job) -> NoReturn:
    kernel.die_with_parent()
    files.enter_new_root(job.limits.folder_mb)
    for name, contents in job.files.items():
        with open(f"{files.BOX}/{name}", "wb") as file:
            file.write(contents)
        os.chmod(file.name, 0o644)
    ours, theirs = socket.socketpair()
    program = os.fork()
    if program == 0:
        _guarded(job, lambda job: _program(job, theirs))
    theirs.close()
    for descriptor in (job.stdin, job.stdout, job.stderr):
        os.close(descriptor)
    _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
    if listeners:
        _watch(job, program, listeners[0], ours)
    os._exit(0)


def _watch(job: Job, program: int, listener: int, channel: socket.socket) -> None:
    """Until the program ends or makes a forbidden call; children that it leaves behind end with this process.

    The other end of `channel` closes when the program takes the place of this code: from then on it is what is measured.
    """
    end = time.monotonic() + job.limits.time_s + 5  # the caller ends it sooner, unless it has gone
    watched = select.poll()
    watched.register(listener, select.POLLIN)
    watched.register(channel, select.POLLIN)
    held = _Held(job)
    ended = status = 0
    while time.monotonic() < end:
        # looked at once more after the program's end: one of its children may have made a forbidden call
        events = dict(watched.poll(0 if ended else 5))
        if channel.fileno() in events:
            watched.unregister(channel)
            _report(job, "started")
        if events.get(listener, 0) & select.POLLIN and (call := seccomp.reported_call(listener)):
            if call.charge is None:
                _report(job, f"forbidden {call.name}")
                return
            if held.add(call.charge):
                seccomp.let_go_on(listener, call)
        held.look()
        if ended:
            code = os.waitstatus_to_exitcode(status)
            _report(job, f"exit {code}" if code >= 0 else f"signal {-code}")
            return
        while ended == 0:  # orphans of the program come to this process, too
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            ended = program if child == program else 0


class _Held:
    """Memory that no process shows: of files in the program's folder, and what calls were charged for (shared memory, since
    it can outlive its place in a process; locks). Told to the caller, who adds it to what processes show."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._charged = 0
        self._at_start = self._in_files()
        self._told = 0

    @staticmethod
    def _in_files() -> int:
        folder = os.statvfs(files.BOX)
        return (folder.f_blocks - folder.f_bfree) * folder.f_frsize

    def add(self, charge: int) -> bool:
        """Whether so much more is within the limit. If it is not, the caller learns it and ends the program."""
        self._charged += charge
        held = self.look()
        if held <= self._job.limits.memory_mb << 20:
            return True
        _report(self._job, f"held {held}")
        return False

    def look(self) -> int:
        held = self._charged + self._in_files() - self._at_start
        if abs(held - self._told) >= _TOLD_BYTES:
            _report(self._job, f"held {held}")
            self._told = held
        return held


def _program(job: Job, channel: socket.socket) -> NoReturn:
    os.setsid()
    for number, descriptor in enumerate((job.stdin, job.stdout, job.stderr)):
        os.dup2(descriptor, number)
    _become_nobody()
    channel = socket.socket(fileno=os.dup2(channel.detach(), seccomp.CHANNEL, inheritable=False))
    own = (
        2 if os.stat(f"{files.BOX}/main.py").st_uid == os.getuid() else 0
    )  # the two processes above, when of the same user
    job.limits.apply(own)
    kernel.drop_privileges()
    kernel.forbid_huge_pages()
    os.chdir(files.BOX)
    socket.send_fds(channel, [b"x"], [seccomp.install()])
    # with threads that each reserve memory, a limit of address space would leave room for two or three
    fixed = {"PATH": "/nowhere", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    environment = {"HOME": files.BOX, "TMPDIR": files.BOX, **fixed}
    arguments = [job.python, "-s", "-S", "-P", "-B", f"{files.BOX}/main.py"]
    kernel.close_at_exec(3)
    job.limits.apply_memory()
    os.execve(job.python, arguments, environment)


def _become_nobody() -> None:
    if os.getuid() != PROGRAM_USER:
        os.setgroups([])
        os.setresgid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
        os.setresuid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
    kernel.die_with_parent()


def _report(job: Job, line: str) -> None:
    os.write(job.status, line.encode() + b"\n")


def _guarded(job: Job, work) -> NoReturn:
    """`work(job)` in a forked process: whatever happens, it never returns into the caller's code."""
    try:
        work(job)
    except MemoryError:
        os.write(job.status, b"failed for lack of memory\n")
    except BaseException as error:  # noqa: BLE001
        _report(job, f"failed {type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(1)
