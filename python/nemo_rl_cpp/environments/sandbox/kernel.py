"""System calls that Python's standard library does not offer, and the filter on the calls that a program may make."""

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 1 << 18
_MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_LAST_CAPABILITY = 63

# system call numbers on x86-64 and arm64
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "mount_setattr": 442, "capset": 126, "close_range": 436},
    "aarch64": {"pivot_root": 41, "mount_setattr": 442, "capset": 91, "close_range": 436},
}

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """Return "x86_64" or "aarch64". Raise OSError on other machines, whose call numbers are not known here."""
    name = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if name not in _NUMBERS:
        raise OSError(f"the code sandbox knows the system calls of x86_64 and aarch64, not of {name}")
    return name


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: object) -> int:
    """Make a system call by name. If it fails, raise OSError, with the call's name in the message."""
    return _checked(_libc.syscall(ctypes.c_long(_NUMBERS[machine()][name]), *arguments), name)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded), f"prctl({option})")


def unshare(flags: int) -> None:
    """Move the process to new namespaces of the kinds `flags`. A new PID namespace holds only later children."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [os.fsencode(value) or None for value in (source, target, kind, options)]
    result = _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    _checked(result, f"mount {source or kind} on {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
    """Set `attributes` (`MOUNT_ATTR_...`, Linux 5.12) on the mount `path`, and if `recursive` on all mounts below."""
    wanted = _MountAttributes(set=attributes)
    syscall(
        "mount_setattr", ctypes.c_int(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)),
    )  # fmt: skip


def change_root(new_root: str) -> None:
    """Make `new_root`, a mount, the root file system. The old root becomes unreachable."""
    os.chdir(new_root)
    syscall("pivot_root", b".", b".")  # the old root now covers the new root, at the same place
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends. Call this after setting the user, which resets it."""
    prctl(_PR_SET_PDEATHSIG, 9)


def close_at_exec(first: int) -> None:
    """Mark all file descriptors from `first` on to be closed at exec."""
    syscall("close_range", ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(4))  # CLOSE_RANGE_CLOEXEC


def drop_privileges() -> None:
    """Drop all capabilities of this process and of every program that it executes."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # this kernel has no further capabilities
    prctl(_PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


# ---- the filter
# The first forbidden call ends the program.
# The kernel runs a filter (seccomp, in BPF instructions) at each call. Calls that libraries try but do not need fail
# instead, and the program continues. These are above all calls that start a process, because the address-space limit
# applies to a single process. Calls that can hold memory outside the address space and the program's folder are forbidden
# or fail. Descriptors cannot be sent (`sendmsg`), so the limit on their number also limits the memory that they hold.

# name -> (number on x86-64, number on arm64)
FORBIDDEN: dict[str, tuple[int, int | None]] = {
    # networks; only socketpair is allowed
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # other processes' memory
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # mounts, roots and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # memory that no limit covers
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0), "mbind": (237, 235),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # parts of the kernel with a large surface
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262), "seccomp": (317, 277),
    # the machine itself
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "quotactl": (179, 60),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
}  # fmt: skip

# These fail with "no such call", so libraries copy instead. They would put pages into pipes, where no limit counts them.
_MISSING = {"sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "clone3": (435, 435)}
# clone3 passes its flags in memory, which a filter cannot read; libraries then use clone.

# These fail with "not supported", as on many file systems: an access list of a file uses 64 kB of kernel memory.
_UNSUPPORTED = {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)}

# These fail with "too many processes": callers continue without, or fail as on a full machine.
_NO_PROCESS = {"fork": (57, None), "vfork": (58, None)}

_NEW_NAMESPACES = 0x7E020000
_THREAD = 0x10000
_SET_SECCOMP, _SET_PIPE_SIZE = 22, 1031
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_SHARED, _ANONYMOUS = 0x01, 0x20
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_SET_SECCOMP_FILTER = 2
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NO_SUCH_CALL, _NOT_SUPPORTED, _TRY_AGAIN, _DONE = _ERROR | 38, _ERROR | 95, _ERROR | 11, _ERROR | 0
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    return _instruction(_LOAD, _ARGUMENTS + 8 * index)  # only the lower half, because all checked arguments are ints


def _any(code: int, values: tuple[int, ...], verdict: int = _KILL) -> list[bytes]:
    """Return BPF instructions that end the filter with `verdict` if the comparison `code` of the loaded argument is
    true for any of `values`."""
    return [part for value in values for part in (_instruction(code, value, 0, 1), _instruction(_RETURN, verdict))]


# name -> (numbers, checks of its arguments); a call that reaches the end of the instructions is allowed
_BY_ARGUMENT = {
    "clone": ((56, 220), [
        _argument(0), *_any(_ANY_BIT, (_NEW_NAMESPACES,)), _instruction(_ANY_BIT, _THREAD, 1), _instruction(_RETURN, _TRY_AGAIN),
    ]),
    "prctl": ((157, 167), [_argument(0), *_any(_EQUAL, (_SET_SECCOMP,))]),
    # locks matter only to other processes, so they appear to succeed and use no kernel memory
    "fcntl": ((72, 25), [_argument(1), *_any(_EQUAL, (_SET_PIPE_SIZE,)), *_any(_EQUAL, _LOCKS, _DONE)]),
    "socketpair": ((53, 199), [_argument(0), *_any(_AT_LEAST, (2,))]),  # AF_UNIX is 1
    # a single page of anonymous shared memory that is still mapped keeps all of that memory
    "mmap": ((9, 222), [_argument(3), _instruction(_ANY_BIT, _ANONYMOUS, 0, 2), *_any(_ANY_BIT, (_SHARED,), _NOT_SUPPORTED)]),
}  # fmt: skip


def filter_program(processor: str) -> bytes:
    """Return the seccomp filter of system calls for `processor`, such as "x86_64", as a BPF program. Most forbidden
    calls kill the program; some return an error."""
    column = processor == "aarch64"
    checks = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, _ARCHITECTURE[processor], 1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    if processor == "x86_64":  # x32 has the same calls under different numbers
        checks += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    tables = (FORBIDDEN, _KILL), (_MISSING, _NO_SUCH_CALL), (_UNSUPPORTED, _NOT_SUPPORTED), (_NO_PROCESS, _TRY_AGAIN)
    for table, verdict in tables:
        for number in (pair[column] for pair in table.values() if pair[column] is not None):
            checks += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, verdict)]
    for numbers, body in _BY_ARGUMENT.values():
        checks += [_instruction(_EQUAL, numbers[column], 0, len(body) + 1), *body, _instruction(_RETURN, _ALLOW)]
    return b"".join([*checks, _instruction(_RETURN, _ALLOW)])


def install_filter() -> None:
    """Install the filter of system calls for the calling process and all its descendants."""
    code = filter_program(machine())
    program = _Program(len(code) // 8, code)
    prctl(_SET_SECCOMP, _SET_SECCOMP_FILTER, ctypes.addressof(program))
