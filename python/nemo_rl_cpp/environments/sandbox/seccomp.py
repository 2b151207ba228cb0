"""The system calls that a program may not make. The first one it tries ends it, and says which one it was.

The kernel asks a filter (seccomp, in the instructions of BPF) at each call; a forbidden one is held and reported through a
file descriptor to the process that watches over the program.
"""

import ctypes
import fcntl
import struct

from nemo_rl_cpp.environments.sandbox import kernel

# name -> (number on x86-64, number on arm64)
FORBIDDEN: dict[str, tuple[int, int]] = {
    # networks
    "socket": (41, 198),
    # other processes' memory
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # mounts, roots and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # parts of the kernel with a large surface
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
    # the machine itself
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "quotactl": (179, 60),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
}  # fmt: skip

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_ALLOW, _KILL, _NOTIFY, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000 | 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENT_0 = 0, 4, 16  # places in struct seccomp_data
_NOTIFICATION_BYTES = 80
_RECEIVE = 0xC0502100  # SECCOMP_IOCTL_NOTIF_RECV


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(machine: str) -> bytes:
    """The filter as BPF instructions: another architecture's calls kill, forbidden ones are reported, the rest passes."""
    numbers = [pair[machine == "aarch64"] for pair in FORBIDDEN.values()]
    checks = [_instruction(_LOAD, _ARCH), _instruction(_EQUAL, _ARCHITECTURE[machine], 1), _instruction(_RETURN, _KILL), _instruction(_LOAD, _NR)]
    if machine == "x86_64":  # the same calls by other numbers
        checks += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    # clone3 passes its flags in memory, where a filter cannot look: "no such call" makes libraries use clone
    checks += [_instruction(_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, _NO_SUCH_CALL)]
    for number in numbers:
        checks += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _NOTIFY)]
    checks += [
        _instruction(_EQUAL, _CLONE[machine], 0, 3), _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _instruction(_RETURN, _NOTIFY),
        _instruction(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(checks)


def install() -> int:
    """Puts the filter on the calling process and all that come from it; returns the descriptor that reports."""
    code = filter_program(kernel.machine())
    program = _Program(len(code) // 8, code)
    return kernel.syscall("seccomp", ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_NEW_LISTENER), ctypes.byref(program))


def reported_call(listener: int) -> str:
    """The name of the forbidden call that a readable listener reports; "" when its caller is gone."""
    notification = bytearray(_NOTIFICATION_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, notification)
    except OSError:
        return ""
    number = struct.unpack_from("=i", notification, 16)[0]
    column = kernel.machine() == "aarch64"
    return next((name for name, pair in FORBIDDEN.items() if pair[column] == number), "clone")
