"""The system calls that a program must not make. The first forbidden call ends the program.

The kernel runs a filter (seccomp, in BPF instructions) at each call. Calls that libraries try but do not need fail
instead, and the program continues. These are above all calls that start a process, because the address-space limit
applies to a single process. Calls that can hold memory outside the address space and the program's folder are forbidden
or fail. Descriptors cannot be sent (`sendmsg`), so the limit on their number also limits the memory that they hold.
"""

import ctypes
import struct

from nemo_rl_cpp.environments.sandbox import kernel

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
    """Return BPF instructions that give `verdict` if the comparison `code` of the loaded argument with any of `values`
    holds."""
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


def filter_program(machine: str) -> bytes:
    """Return the filter as BPF instructions. Forbidden calls and calls of another architecture kill the program; some
    calls fail.
    """
    column = machine == "aarch64"
    checks = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, _ARCHITECTURE[machine], 1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    if machine == "x86_64":  # x32 has the same calls under different numbers
        checks += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    tables = (FORBIDDEN, _KILL), (_MISSING, _NO_SUCH_CALL), (_UNSUPPORTED, _NOT_SUPPORTED), (_NO_PROCESS, _TRY_AGAIN)
    for table, verdict in tables:
        for number in (pair[column] for pair in table.values() if pair[column] is not None):
            checks += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, verdict)]
    for numbers, body in _BY_ARGUMENT.values():
        checks += [_instruction(_EQUAL, numbers[column], 0, len(body) + 1), *body, _instruction(_RETURN, _ALLOW)]
    return b"".join([*checks, _instruction(_RETURN, _ALLOW)])


def install() -> None:
    """Install the filter for the calling process and all its descendants."""
    code = filter_program(kernel.machine())
    program = _Program(len(code) // 8, code)
    kernel.prctl(_SET_SECCOMP, _SET_SECCOMP_FILTER, ctypes.addressof(program))
