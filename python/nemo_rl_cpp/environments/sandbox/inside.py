"""The processes inside the sandbox, and the files that the program sees. There are three processes, each started by the
previous one:

1. The keeper leaves the caller's namespaces and waits. If the caller ends, the kernel kills the keeper.
2. The first process of the new PID namespace builds the file system and waits for the program. If this process ends,
for whatever reason, the kernel kills the program.
3. The program."""

import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from nemo_rl_cpp.environments.sandbox import kernel

if TYPE_CHECKING:
    from nemo_rl_cpp.environments.sandbox.run import Limits

NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip
PROGRAM_USER = 65534  # the program's user id and group id inside its namespace
BOX = "/box"  # the program's folder and working directory
_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID


@dataclass(frozen=True)
class Job:
    """A program to run in the sandbox, and the file descriptors for communication with it."""

    python: str  # path of the interpreter, the same outside and inside
    files: dict[str, bytes]  # name in the program's folder -> contents; `main.py` is run
    limits: "Limits"
    stdin: int  # the program's standard streams
    stdout: int
    stderr: int
    status: int  # the keeper and the first process report here, one line each time
    go: int  # becomes readable when the caller has mapped the users of the new namespace


def guarded(job: Job, work: Callable[[Job], None]) -> NoReturn:
    """Call `work(job)`, report an exception to `job.status`, and end this forked process."""
    try:
        work(job)
    except MemoryError:
        os.write(job.status, b"failed for lack of memory\n")
    except BaseException as error:  # noqa: BLE001
        _report(job, f"failed {type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(1)


def _report(job: Job, line: str) -> None:
    os.write(job.status, line.encode() + b"\n")


def keeper(job: Job, caller: int) -> NoReturn:
    os.setsid()  # signals to the program's process group must not reach the caller
    kept = {0, 1, 2, job.stdin, job.stdout, job.stderr, job.status, job.go}
    for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if descriptor not in kept:  # the caller's descriptors, which may exceed the program's limit
            with suppress(OSError):  # the listing's own descriptor is already closed
                os.close(descriptor)
    kernel.unshare(NAMESPACES)
    kernel.die_with_parent()
    if os.getppid() != caller:
        os._exit(1)
    _report(job, "unshared")
    if not os.read(job.go, 1):
        os._exit(1)
    first = os.fork()
    if first == 0:
        guarded(job, _first_process)
    _report(job, f"pid {first}")
    os.waitpid(first, 0)
    os._exit(0)


def _first_process(job: Job) -> NoReturn:
    kernel.die_with_parent()
    _enter_new_root(job.limits.folder_mb)
    for name, contents in job.files.items():
        with open(f"{BOX}/{name}", "wb") as file:
            file.write(contents)
        os.chmod(file.name, 0o644)
    started, closes_at_exec = os.pipe()
    program = os.fork()
    if program == 0:
        guarded(job, _program)
    for descriptor in (closes_at_exec, job.stdin, job.stdout, job.stderr):
        os.close(descriptor)
    os.read(started, 1)
    _report(job, "started")
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    _report(job, f"exit {code}")
    os._exit(0)


def _program(job: Job) -> NoReturn:
    os.setsid()
    for number, descriptor in enumerate((job.stdin, job.stdout, job.stderr)):
        os.dup2(descriptor, number)
    if os.getuid() != PROGRAM_USER:
        os.setgroups([])
        os.setresgid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
        os.setresuid(PROGRAM_USER, PROGRAM_USER, PROGRAM_USER)
    kernel.die_with_parent()
    of_the_same_user = os.stat(f"{BOX}/main.py").st_uid == os.getuid()
    job.limits.apply(2 if of_the_same_user else 0)  # the keeper and the first process
    kernel.drop_privileges()
    os.chdir(BOX)
    # MALLOC_ARENA_MAX: threads reserve memory, so the limit would otherwise allow only two or three of them
    fixed = {"PATH": "/nowhere", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    environment = {"HOME": BOX, "TMPDIR": BOX, **fixed}
    arguments = [job.python, "-s", "-S", "-P", "-B", f"{BOX}/main.py"]
    kernel.close_at_exec(3)
    kernel.install_filter()
    job.limits.apply_memory()
    os.execve(job.python, arguments, environment)


# ---- the files that the program sees: the interpreter with its libraries, read-only, and one writable folder


def interpreter() -> str:
    """Return the path of this process's Python interpreter: the real file, not the link in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _visible_paths() -> list[str]:
    """Return the paths that are mounted in the sandbox: interpreter, standard library, system libraries."""
    standard_library = os.path.dirname(os.__file__)
    names = [interpreter(), standard_library, sysconfig.get_config_var("LIBDIR") or ""]
    names += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    kept: list[str] = []
    for path in sorted({os.path.realpath(name) for name in names if name and os.path.exists(name)}):
        if not any(path.startswith(other + "/") for other in kept):  # a bound folder includes its subfolders
            kept.append(path)
    return kept


def _enter_new_root(folder_mb: int) -> None:
    """Build a root file system with `_visible_paths` and an empty folder `BOX` of at most `folder_mb` MB, and enter it.
    The caller must be alone in its mount namespace."""
    staging = "/tmp"
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # nothing that follows is visible outside
    # /dev/zero is omitted: when mapped, it is shared memory, which can be held without address space
    attributes = dict.fromkeys(_visible_paths(), _READ_ONLY | kernel.MOUNT_ATTR_NODEV)
    attributes |= dict.fromkeys(("/dev/null", "/dev/urandom"), kernel.MOUNT_ATTR_NOSUID)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in attributes}
    links = [(link, os.readlink(link)) for link in ("/lib", "/lib64", "/bin") if os.path.islink(link)]
    kernel.mount("tmpfs", staging, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=512,mode=755")
    for path, descriptor in sources.items():
        _bind(descriptor, staging + path)
        kernel.set_mount_attributes(staging + path, attributes[path])
        os.close(descriptor)
    for link, target in links:
        if not os.path.lexists(staging + link):
            os.symlink(target, staging + link)
    os.mkdir(staging + BOX)
    options = f"size={folder_mb}m,nr_inodes=1024,mode=777"
    kernel.mount("tmpfs", staging + BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.set_mount_attributes(staging, _READ_ONLY, recursive=False)
    kernel.change_root(staging)


def _bind(source: int, target: str) -> None:
    """Bind-mount the file or folder with the descriptor `source` at the path `target`."""
    original = os.readlink(f"/proc/self/fd/{source}")
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    try:
        kernel.mount(f"/proc/self/fd/{source}", target, flags=kernel.MS_BIND | kernel.MS_REC)
    except OSError as error:
        raise OSError(error.errno, f"showing {original}: {error.strerror}") from None
