"""Ways to make the system hold memory: together they stay within the limit, whichever way, or are refused.

The programs say themselves how much they hold, a dot for every 256 kB, once it is held: no count of the sandbox is asked.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
LIMIT_MB = 128
START = """
import ctypes, fcntl, mmap, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PIECE = 1 << 18
def held(n=1): os.write(1, b"." * n)
def refused(): raise SystemExit("refused: " + os.strerror(ctypes.get_errno()))
def in_children(work, count=6, wait=60):
    for _ in range(count):
        if os.fork() == 0:
            try: work()
            except (MemoryError, OSError): pass
            time.sleep(60)
    time.sleep(wait)
    raise SystemExit(3)
def fill(memory, size=PIECE):
    for at in range(0, size, 4096): memory[at] = 1
kept = []
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
"""
PRIVATE = """
def work():
    while True:
        kept.append(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        fill(kept[-1]); held()
"""
SHARED = PRIVATE.replace("MAP_PRIVATE", "MAP_SHARED")
SOCKETS = """
def work():
    full = 0
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True: full += end.send(bytes(4096))
            except BlockingIOError: pass
        held(full // PIECE)
        full %= PIECE
"""
# name -> (program, how it ends: reasons of the sandbox, or "error" where a call fails)
WAYS = {
    "private pages": (PRIVATE + "work()", {"error", "memory_limit"}),
    "private pages of six": (PRIVATE + "in_children(work)", {"memory_limit"}),
    "one mapping shared by six": (
        "area = mmap.mmap(-1, 100 << 20)\ndef work():\n    mine = mmap.mmap(-1, 90 << 20)\n    for at in range(0, 90 << 20, PIECE):\n"
        "        for page in range(at, at + PIECE, 4096): mine[page] = 1\n        held()\nin_children(work)",
        {"memory_limit"},
    ),
    "shared mappings of six": (SHARED + "in_children(work)", {"memory_limit"}),
    "shared pages that no process has in its table": (
        SHARED + "        kept[-1].madvise(mmap.MADV_DONTNEED)\nin_children(work)",
        {"memory_limit"},
    ),
    "shared mappings cut down to one page": (
        "while True:\n    at = libc.mmap(None, PIECE, 3, 0x21, -1, 0)\n    if at == ctypes.c_void_p(-1).value: refused()\n"
        "    for page in range(0, PIECE, 4096): ctypes.memset(at + page, 1, 1)\n    held()\n    libc.munmap(at + 4096, PIECE - 4096)",
        {"memory_limit"},
    ),
    "shared mappings of one byte, which hold a page": (
        "def work():\n    while True:\n        for _ in range(64):\n            at = libc.mmap(None, 1, 3, 0x21, -1, 0)\n"
        "            if at == ctypes.c_void_p(-1).value: refused()\n            ctypes.memset(at, 1, 1)\n        held()\nin_children(work)",
        {"memory_limit", "time_limit"},  # each is counted by a process outside, which takes a while
    ),
    "pages and pipes whose names were deleted": (
        "x = bytearray(100 << 20)\nfill(x, len(x))\nheld(400)\ndef work():\n    path = f'/box/{os.getpid()}'\n    while True:\n"
        "        os.mkfifo(path); f = os.open(path, os.O_RDWR | os.O_NONBLOCK); os.unlink(path); kept.append(f)\n        try:\n"
        "            while True: os.write(f, bytes(4096))\n        except BlockingIOError: pass\n        if len(kept) % 4 == 0: held()\n"
        "in_children(work, wait=0.5)",
        {"memory_limit"},
    ),
    "rules of a sandbox of its own": ("libc.syscall(444, (ctypes.c_uint64 * 3)(0, 3, 0), 16, 0)", {"forbidden_call"}),
    "page tables of six": (
        "def work():\n    for i in range(20000):\n        at = libc.mmap((1 << 40) + (i << 30), 4096, 3, 0x100022, -1, 0)\n"
        "        if at == ctypes.c_void_p(-1).value: break\n        ctypes.memset(at, 1, 1)\n        if i % 22 == 21: held()\nin_children(work, wait=2)",
        {"memory_limit"},
    ),
    "copies of a file's pages": (
        "open('/box/x', 'wb').write(bytes(20 << 20))\nheld(80)\ndef work():\n    f = open('/box/x', 'r+b')\n    for _ in range(4):\n"
        "        kept.append(mmap.mmap(f.fileno(), 20 << 20, flags=mmap.MAP_PRIVATE))\n        for at in range(0, 20 << 20, PIECE):\n"
        "            for page in range(at, at + PIECE, 4096): kept[-1][page] = 1\n            held()\nin_children(work)",
        {"memory_limit"},
    ),
    "programs that may not be read": (
        "import glob, shutil\nshutil.copyfile(glob.glob('/lib*/ld-linux*')[0], '/box/ld'); os.chmod('/box/ld', 0o111)\n"
        "code = START + 'work()'\nfor _ in range(5):\n    if os.fork() == 0: os.execv('/box/ld', ['ld', sys.executable or os.readlink('/proc/self/exe'), '-S', '-c', code])\n"
        "time.sleep(60)".replace("START", repr(START + PRIVATE)),
        {"memory_limit"},
    ),
    "attributes of a file": (
        "open('/box/x', 'w')\nfor i in range(10000):\n    os.setxattr('/box/x', f'user.{i}', bytes(65000)); held(int(i % 4 == 3))",
        {"error"},  # no room beyond a megabyte, or none at all
    ),
    "files and pages": (
        "for i in range(120):\n    with open(f'/box/{i}', 'wb') as f: f.write(bytes(PIECE))\n    held()\n" + PRIVATE + "in_children(work)",
        {"memory_limit"},
    ),
    "deleted files": (
        "while True:\n    f = open('/box/x', 'wb', buffering=0); os.unlink('/box/x'); kept.append(f)\n"
        "    if f.write(bytes(PIECE)) < PIECE: raise OSError(28, 'full')\n    held()",
        {"error"},
    ),
    "a mapped device": ("f = os.open('/dev/zero', os.O_RDWR)", {"error"}),
    "memfd_create": ("os.memfd_create('x')", {"forbidden_call"}),
    "System V memory": ("libc.shmget(0, PIECE, 0o1600)", {"forbidden_call"}),
    "System V messages": ("libc.msgget(0, 0o1600)", {"forbidden_call"}),
    "a POSIX queue": ("libc.mq_open(b'/x', 0o102, 0o600, None)", {"forbidden_call"}),
    "socket buffers of six": (SOCKETS + "in_children(work)", {"memory_limit"}),
    "larger socket buffers": ("socket.socketpair()[0].setsockopt(1, 7, 1 << 22)", {"forbidden_call"}),
    "messages for a name": ("a, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.bind('/box/a')", {"forbidden_call"}),
    "descriptors on their way": ("a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [1])", {"forbidden_call"}),
    "pipes of six": (
        "def work():\n    while True:\n        r, w = os.pipe(); os.set_blocking(w, False)\n        try:\n            while True: os.write(w, bytes(4096))\n"
        "        except BlockingIOError: pass\n        kept.append((r, w))\n        if len(kept) % 4 == 0: held()\nin_children(work, wait=0.5)",
        {"error"},  # all that they may have are not much
    ),
    "larger pipes": ("fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", {"forbidden_call"}),
    "pages given to a pipe": ("v = (ctypes.c_void_p * 2)(0, 0)\nif libc.vmsplice(os.pipe()[1], v, 1, 8) < 0: refused()", {"error"}),
    "pages of a file in a pipe": (
        "open('/box/x', 'wb').write(bytes(PIECE))\nos.splice(os.open('/box/x', 0), os.pipe()[1], PIECE)", {"error"},
    ),
    "events": ("libc.inotify_init()", {"forbidden_call"}),
    "asynchronous reading": ("libc.syscall(206 if os.uname().machine == 'x86_64' else 0, 1000, ctypes.byref(ctypes.c_long()))", {"forbidden_call"}),
    "its own filter": ("libc.prctl(22, 2, 0, 0, 0)", {"forbidden_call"}),
    "hidden descriptors": ("libc.prctl(4, 0, 0, 0, 0)", {"forbidden_call"}),
    "locks": (
        "f = open('/box/x', 'wb')\nimport struct\nfor i in range(2000): fcntl.fcntl(f, fcntl.F_SETLK, struct.pack('hhqqi', 1, 0, 2 * i, 1, 0))\nraise SystemExit(3)",
        {"memory_limit", "error"},
    ),
    "mappings of six": (
        "def work():\n    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n    at = libc.mmap(None, 100 << 20, 0, 0x22, -1, 0)\n"
        "    for page in range(0, 100 << 20, 8192): libc.mprotect(at + page, 4096, 3)\nin_children(work, wait=1)",
        {"memory_limit", "error"},
    ),
    "a first thread that has ended": (
        "import threading\n" + PRIVATE.replace("while True", "for _ in range(400)") + "def rest():\n    time.sleep(0.05)\n    in_children(work, 5)\nthreading.Thread(target=rest).start()\nlibc.pthread_exit(None)",
        {"memory_limit"},
    ),
    "shared mappings of one byte": (
        "def work():\n    while True:\n        for _ in range(64):\n            at = libc.mmap(None, 1, 3, 0x21, -1, 0)\n            if at == ctypes.c_void_p(-1).value: refused()\n"
        "            ctypes.memset(at, 1, 1)\n        held()\nin_children(work)",
        {"memory_limit"},
    ),
    "pipes that had one name": (  # so that a count by name is 22 MB too small
        "x = bytearray(102 << 20)\nfill(x, len(x))\nheld(102 * 4)\ndef work():\n    name = f'/box/{os.getpid()}'\n    for _ in range(60):\n"
        "        os.mkfifo(name); kept.append(os.open(name, os.O_RDWR | os.O_NONBLOCK)); os.unlink(name)\n        try:\n            while True: os.write(kept[-1], bytes(4096))\n"
        "        except BlockingIOError: pass\n        if len(kept) % 4 == 0: held()\nin_children(work, wait=1)",
        {"memory_limit"},
    ),
    "access lists": (
        "import struct\nentry = struct.Struct('<HHI').pack\nown = b''.join(entry(tag, 7, 0xffffffff) for tag in (4, 16, 32))\n"
        "acl = struct.pack('<I', 2) + entry(1, 7, 0xffffffff) + entry(2, 7, 65534) * 8180 + own\n"
        "for i in range(1000):\n    os.mkdir(f'/box/{i}')\n    for kind in ('access', 'default'): os.setxattr(f'/box/{i}', 'system.posix_acl_' + kind, acl)\n"
        "    if i % 2: held()\ntime.sleep(60)",
        {"error"},
    ),
    "attributes of open files": ("f = open('/box/x', 'wb')\nwhile True: os.setxattr(f.fileno(), f'user.{len(kept)}', bytes(PIECE)); held(); kept.append(1)", {"error"}),
    "rules of its own sandbox": ("libc.syscall(444, bytes([0] * 8 + [3] + [0] * 7), ctypes.c_size_t(16), 0)", {"forbidden_call"}),
    "policies of pages": ("libc.syscall(237 if os.uname().machine == 'x86_64' else 235, 0, ctypes.c_size_t(4096), 1, 0, 0, 0)", {"forbidden_call"}),
    "messages of one byte": (
        SOCKETS.replace("socketpair()", "socketpair(type=socket.SOCK_SEQPACKET)").replace("bytes(4096)", "b'x'") + "in_children(work)",
        {"memory_limit"},
    ),
    "huge pages": ("at = libc.mmap(None, 2 << 20, 3, 0x40021, -1, 0)\nif at == ctypes.c_void_p(-1).value: refused()", {"error"}),
    "locked pages": ("x = mmap.mmap(-1, 8 << 20)\nif libc.mlock(ctypes.addressof(ctypes.c_char.from_buffer(x)), 8 << 20): refused()", {"error"}),
    "a shared mapping made larger": (  # SIGBUS: there is no memory behind it
        "libc.mremap.restype = ctypes.c_void_p\nlibc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]\n"
        "at = libc.mremap(libc.mmap(None, 4096, 3, 0x21, -1, 0), 4096, 300 << 20, 1)\nif at in (None, ctypes.c_void_p(-1).value): refused()\n"
        "for page in range(0, 300 << 20, PIECE): ctypes.memset(at + page, 1, PIECE); held()",
        {"error"},
    ),
    "copies of a file's pages, larger": (
        "open('/box/x', 'wb').write(bytes(16 << 20))\nf = os.open('/box/x', os.O_RDWR)\nheld(64)\ndef work():\n    while True:\n"
        "        kept.append(mmap.mmap(f, 4 * PIECE, flags=mmap.MAP_PRIVATE)); fill(kept[-1], 4 * PIECE); held(4)\nin_children(work)",
        {"memory_limit"},
    ),
    "each child of the one before": (
        PRIVATE.replace("while True", "for _ in range(80)") + "for _ in range(6):\n    work()\n    if os.fork(): time.sleep(60)\n    kept[:] = [bytearray(x) for x in kept]\nraise SystemExit(3)",
        {"memory_limit"},
    ),
    "long arguments": (
        "def work():\n    code = 'import sys, os, time; os.write(1, b\".\" * 6); time.sleep(60)'\n"
        "    os.execve(sys.executable or '/proc/self/exe', ['python', '-S', '-c', code], {str(i): 'x' * 120000 for i in range(13)})\nin_children(work, wait=0.5)",
        {"memory_limit", "error"},
    ),
}  # fmt: skip
# what stays below the limit is let be: name -> program that prints "good"
FINE = {
    "private pages": "x = bytearray(90 << 20)\nfill(x, len(x))",
    "shared pages": "x = mmap.mmap(-1, 90 << 20)\nfill(x, len(x))\nif os.fork() == 0: fill(x, len(x)); os._exit(0)\nos.wait()",
    "pages that six have in common": (
        "x = bytearray(60 << 20)\nfill(x, len(x))\nfor _ in range(6):\n    if os.fork() == 0: time.sleep(0.3); os._exit(0)\nfor _ in range(6): os.wait()"
    ),
    "files": "open('/box/x', 'wb').write(bytes(25 << 20))\nimport shutil; shutil.copyfile('/box/main.py', '/box/y')",
    "programs that it starts": (  # which have all its memory, as one, until they are there
        "import subprocess\nx = bytearray(80 << 20)\nfill(x, len(x))\nfor _ in range(100):\n    try: subprocess.run(['/nowhere'])\n    except FileNotFoundError: pass\n"
        "assert subprocess.run([sys.executable or '/proc/self/exe', '-S', '-c', 'print(7)'], capture_output=True).stdout == b'7\\n'"
    ),
    "copies with attributes": "import shutil\nfor i in range(3): shutil.copy2('/box/main.py', f'/box/{i}')",
    "an event loop": "import asyncio\nasync def f(): await asyncio.sleep(0)\nfor _ in range(30): asyncio.run(f())",
    "pipes between processes": "import multiprocessing as m\na, b = m.Pipe()\nif os.fork() == 0: b.send(list(range(2000))); os._exit(0)\na.recv(); os.wait()",
    "standard input as a file": "x = mmap.mmap(0, 0, access=mmap.ACCESS_READ)\nassert x[:] == b'in'",
}  # fmt: skip
RUN_ALL = """
import json, sys
from nemo_rl_cpp.environments.sandbox import Limits, run_program
limits = Limits(time_s=float(sys.argv[1]), memory_mb=int(sys.argv[2]), folder_mb=32)
for name, program in json.load(sys.stdin).items():
    outcome = run_program(program, stdin="in", limits=limits)
    print(json.dumps([name, {**vars(outcome), "stdout": outcome.stdout.decode(), "stderr": outcome.stderr.decode()}]), flush=True)
"""


def run_all(programs: dict[str, str], time_s: float, memory_mb: int = LIMIT_MB) -> dict[str, dict]:
    """Name -> outcome, by a process of one thread."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(time_s), str(memory_mb)], input=json.dumps({name: START + text for name, text in programs.items()}),
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(map(json.loads, ran.stdout.splitlines()))


@pytest.fixture(scope="module")
def outcomes():
    return run_all({name: program for name, (program, _) in WAYS.items()}, time_s=3.0)


@pytest.mark.parametrize("name", WAYS)
def test_no_way_holds_more_than_the_limit(outcomes, name):
    outcome = outcomes[name]
    assert outcome["stdout"].count(".") / 4 <= 1.1 * LIMIT_MB
    assert (outcome["stopped"] or ("error" if outcome["exit_code"] else "fine")) in WAYS[name][1], outcome


def test_what_is_within_the_limit_is_let_be():
    outcomes = run_all({name: f"{program}\nprint('good')" for name, program in FINE.items()}, time_s=30.0)
    assert {name: outcome["stdout"] for name, outcome in outcomes.items()} == dict.fromkeys(FINE, "good\n"), outcomes
