"""Inside the sandbox: three processes, each started by the one before.

1. The keeper leaves the caller's namespaces and waits. When the caller dies, so does the keeper.
2. The first process of the new process namespace builds the file system and watches over the program. When it ends, for
   whatever reason, the kernel ends the program.
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
    """Reports how the program ends, or the forbidden call that it makes.

    The other end of `channel` closes when the program takes the place of this code.
    """
    end = time.monotonic() + job.limits.time_s + 5  # the caller ends it sooner, unless it has gone
    ended = os.pidfd_open(program)
    watched = select.poll()
    for descriptor in (listener, channel.fileno(), ended):
        watched.register(descriptor, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        events = dict(watched.poll(1000 * left))
        if channel.fileno() in events:
            watched.unregister(channel)
            _report(job, "started")
        if events.get(listener, 0) & select.POLLIN and (call := seccomp.reported_call(listener)):
            _report(job, f"forbidden {call}")
            return
        if ended in events:
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            _report(job, f"exit {code}" if code >= 0 else f"signal {-code}")
            return


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
