"""The files that a program sees: the interpreter with its libraries, read-only, and one writable folder of its own."""

import os
import sys
import sysconfig

from nemo_rl_cpp.environments.sandbox import kernel

BOX = "/box"
"""The program's own folder, and its working directory."""

_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID


def interpreter() -> str:
    """The Python that runs programs: this process's own, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def visible_paths() -> list[str]:
    """What is bound into the sandbox, each at its own place: the interpreter, its standard library, system libraries."""
    standard_library = os.path.dirname(os.__file__)
    names = [interpreter(), standard_library, sysconfig.get_config_var("LIBDIR") or ""]
    names += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    kept: list[str] = []
    for path in sorted({os.path.realpath(name) for name in names if name and os.path.exists(name)}):
        if not any(path.startswith(other + "/") for other in kept):  # a folder shows what lies below it
            kept.append(path)
    return kept


def enter_new_root(folder_mb: int) -> None:
    """Makes a new root of `visible_paths` and an empty `BOX`, and enters it. The caller is alone in its mount namespace.

    Raises OSError that names the mount that failed.
    """
    staging = "/tmp"
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # nothing that follows shows outside
    paths = [(path, _open(path)) for path in visible_paths()]
    # /dev/zero is not among them: mapped, it is shared memory, which can be held without address space
    devices = [(path, _open(path)) for path in ("/dev/null", "/dev/urandom")]
    links = [(link, os.readlink(link)) for link in ("/lib", "/lib64", "/bin") if os.path.islink(link)]
    kernel.mount("tmpfs", staging, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=512,mode=755")
    for path, descriptor in paths:
        _bind(descriptor, staging + path)
        kernel.set_mount_attributes(staging + path, _READ_ONLY | kernel.MOUNT_ATTR_NODEV)
    for path, descriptor in devices:
        _bind(descriptor, staging + path)
        kernel.set_mount_attributes(staging + path, kernel.MOUNT_ATTR_NOSUID)
    for link, target in links:
        if not os.path.lexists(staging + link):
            os.symlink(target, staging + link)
    os.mkdir(staging + BOX)
    options = f"size={folder_mb}m,nr_inodes=1024,mode=777"
    kernel.mount("tmpfs", staging + BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.set_mount_attributes(staging, _READ_ONLY, recursive=False)
    kernel.change_root(staging)
    for _, descriptor in (*paths, *devices):
        os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _bind(source: int, target: str) -> None:
    """Shows what `source` is open on at `target` too."""
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
