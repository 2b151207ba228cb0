"""A check of whether this machine can sandbox untrusted programs: it runs a program in a sandbox that tries to escape
(`python -m nemo_rl_cpp.environments.sandbox.check`)."""

import os
import subprocess
import sys

from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.environments.sandbox.run import Limits, SandboxUnavailableError, run_program

_PROBE = """
import os
found = []
for path in ("/etc/passwd", "/proc/self", "/home", "/dev/shm", "/tmp", "/var"):
    if os.path.exists(path):
        found.append("files: the program sees " + path)
try:
    open("/written", "w")
    found.append("files: the program writes outside its folder")
except OSError:
    pass
try:
    bytearray(4 << 30)
    found.append("memory: RLIMIT_AS does not hold")
except MemoryError:
    pass
if os.getpid() > 8:
    found.append("processes: no PID namespace")
if os.getuid() == 0:
    found.append("privileges: the program runs as root")
try:
    os.fork() or os._exit(0)
    found.append("processes: the program starts another one")
except BlockingIOError:
    pass
import threading
held = threading.Event()
try:
    for _ in range(64):
        threading.Thread(target=held.wait, daemon=True).start()
    found.append("threads: RLIMIT_NPROC does not hold")
except RuntimeError:
    held.set()
print("\\n".join(found) or "ok", flush=True)
"""
_SOCKET = "import socket; socket.socket()"
_NEEDS = (
    "The code environment needs Linux 5.12 or newer with user, mount, process and network namespaces for unprivileged users and seccomp "
    "(in a container: a profile that allows them; on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


def missing_protections() -> list[str]:
    """Return one sentence per missing protection of the sandbox. The calling process must have a single thread."""
    if sys.platform != "linux":
        return [f"Linux: this is {sys.platform}"]
    limits = Limits(time_s=10, memory_mb=256, threads=4)
    try:
        probe, network = (run_program(program, limits=limits) for program in (_PROBE, _SOCKET))
    except (SandboxUnavailableError, OSError) as error:
        return [str(error)]
    told = (probe.stdout or probe.stderr).decode(errors="replace").strip()
    missing = [] if told.startswith("ok") else told.split("\n") if told else [f"the probe ended with {probe.exit_code}"]
    if network.stopped != "forbidden_call":
        missing.append("network: a program can open a socket")
    return missing


def require_sandbox() -> None:
    """Raise SandboxUnavailableError if a protection is missing. The check runs in a new, single-threaded process."""
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "nemo_rl_cpp.environments.sandbox.check"],
        capture_output=True, text=True, timeout=120, env={**os.environ, **worker_environment(1)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if asked.returncode != 0:
        raise SandboxUnavailableError((asked.stdout or asked.stderr).strip()[-2000:])


def main() -> int:
    missing = missing_protections()
    for item in missing:
        print(f"missing: {item}")
    print(
        _NEEDS
        if missing
        else "ok: programs run without network, without files but their own, within limits of time, memory and processes"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
