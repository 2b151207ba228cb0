"""System calls that Python's standard library does not offer."""

import ctypes
import os
import platform

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
    """Return "x86_64" or "aarch64". Raise OSError on any other machine, because its system call numbers are not known
    here.
    """
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
    """Move the calling process to new namespaces. A new PID namespace takes effect only for children
    forked afterwards.
    """
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [os.fsencode(value) or None for value in (source, target, kind, options)]
    result = _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3])
    _checked(result, f"mount {source or kind} on {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
    """Set attributes (`MOUNT_ATTR_...`) on the mount at `path`, and if `recursive` on all mounts below
    it (Linux 5.12).
    """
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
    """Have the kernel kill this process when its parent ends. Call this after a change of the user, which resets it."""
    prctl(_PR_SET_PDEATHSIG, 9)


def close_at_exec(first: int) -> None:
    """Mark all file descriptors from `first` on, including inherited ones, to be closed at exec."""
    syscall("close_range", ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(4))  # CLOSE_RANGE_CLOEXEC


def drop_privileges() -> None:
    """Drop all capabilities, for now and after any exec."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # this kernel has no further capabilities
    prctl(_PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
