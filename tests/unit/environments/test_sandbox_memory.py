"""Tests of ways to allocate memory in the sandbox: each stays within the limit or fails.

The programs report how much memory they hold, a dot for every 256 kB, so the sandbox's own count is not used."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
LIMIT_MB = 128
START = """
import ctypes, fcntl, mmap, os, resource, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
PIECE = 1 << 18
def held(n=1): os.write(1, b"." * n)
def refused(): raise SystemExit("refused: " + os.strerror(ctypes.get_errno()))
def in_threads(work, count=6):
    def until_refused():
        try: work()
        except (MemoryError, OSError): pass
    threading.stack_size(PIECE)
    threads = [threading.Thread(target=until_refused) for _ in range(count)]
    for one in threads: one.start()
    for one in threads: one.join()
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
FIFOS = """
def work():
    name = f'/box/{threading.get_ident()}'
    while True:
        os.mkfifo(name); kept.append(os.open(name, os.O_RDWR | os.O_NONBLOCK)); os.unlink(name)
        try:
            while True: os.write(kept[-1], bytes(4096))
        except BlockingIOError: pass
        if len(kept) % 4 == 0: held()
"""
# with the pages that its first thread has taken, in a thread that goes on without it
WITHOUT_THE_FIRST = """
def rest():
    time.sleep(0.05)
    try: work()
    except (MemoryError, OSError): os._exit(3)
threading.Thread(target=rest).start()
libc.pthread_exit(None)
"""
# name -> (program, how it ends: reasons of the sandbox, or "error" where a call fails)
WAYS = {
    "private pages": (PRIVATE + "work()", {"error"}),
    "private pages of six threads": (PRIVATE + "in_threads(work)", {"error"}),
    "private pages without the first thread": (PRIVATE + WITHOUT_THE_FIRST, {"error"}),
    "private pages of children": (PRIVATE + "while True:\n    if os.fork() == 0: work()", {"error"}),
    "private pages of another program": (PRIVATE + "os.posix_spawn(sys.executable or '/proc/self/exe', ['python', '-c', ''], {})", {"error"}),
    "shared mappings": ("mmap.mmap(-1, 1)", {"error"}),
    "shared mappings, checked": ("if libc.mmap(None, 4096, 3, 0x23, -1, 0) == ctypes.c_void_p(-1).value: refused()", {"error"}),
    "pages and pipes whose names were deleted": (
        FIFOS + "x = bytearray(80 << 20)\nfill(x, len(x))\nheld(80 * 4)\nin_threads(work)", {"error"},
    ),
    "copies of a file's pages": (
        "open('/box/x', 'wb').write(bytes(20 << 20))\nheld(80)\nf = open('/box/x', 'r+b')\ndef work():\n    while True:\n"
        "        kept.append(mmap.mmap(f.fileno(), 4 * PIECE, flags=mmap.MAP_PRIVATE)); fill(kept[-1], 4 * PIECE); held(4)\nin_threads(work)",
        {"error"},
    ),
    "files and pages": (
        "for i in range(120):\n    with open(f'/box/{i}', 'wb') as f: f.write(bytes(PIECE))\n    held()\n" + PRIVATE + "in_threads(work)",
        {"error"},
    ),
    "socket buffers": (SOCKETS + "in_threads(work)", {"error"}),
    "messages of one byte": (
        SOCKETS.replace("socketpair()", "socketpair(type=socket.SOCK_SEQPACKET)").replace("bytes(4096)", "b'x'") + "in_threads(work)",
        {"error"},
    ),
    "pipes": (FIFOS + "in_threads(work)", {"error"}),
    "rules of a sandbox of its own": ("libc.syscall(444, (ctypes.c_uint64 * 3)(0, 3, 0), 16, 0)", {"forbidden_call"}),
    "attributes of a file": (
        "open('/box/x', 'w')\nfor i in range(10000):\n    os.setxattr('/box/x', f'user.{i}', bytes(65000)); held(int(i % 4 == 3))",
        {"error"},  # no room beyond a megabyte, or none at all
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
    "larger socket buffers": ("socket.socketpair()[0].setsockopt(1, 7, 1 << 22)", {"forbidden_call"}),
    "messages for a name": ("a, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.bind('/box/a')", {"forbidden_call"}),
    "descriptors on their way": ("a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [1])", {"forbidden_call"}),
    "larger pipes": ("fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)", {"forbidden_call"}),
    "pages given to a pipe": ("v = (ctypes.c_void_p * 2)(0, 0)\nif libc.vmsplice(os.pipe()[1], v, 1, 8) < 0: refused()", {"error"}),
    "pages of a file in a pipe": (
        "open('/box/x', 'wb').write(bytes(PIECE))\nos.splice(os.open('/box/x', 0), os.pipe()[1], PIECE)", {"error"},
    ),
    "events": ("libc.inotify_init()", {"forbidden_call"}),
    "asynchronous reading": ("libc.syscall(206 if os.uname().machine == 'x86_64' else 0, 1000, ctypes.byref(ctypes.c_long()))", {"forbidden_call"}),
    "its own filter": ("libc.prctl(22, 2, 0, 0, 0)", {"forbidden_call"}),
    "access lists": (
        "import struct\nentry = struct.Struct('<HHI').pack\nown = b''.join(entry(tag, 7, 0xffffffff) for tag in (4, 16, 32))\n"
        "acl = struct.pack('<I', 2) + entry(1, 7, 0xffffffff) + entry(2, 7, 65534) * 8180 + own\n"
        "for i in range(1000):\n    os.mkdir(f'/box/{i}')\n    for kind in ('access', 'default'): os.setxattr(f'/box/{i}', 'system.posix_acl_' + kind, acl)\n"
        "    if i % 2: held()\ntime.sleep(60)",
        {"error"},
    ),
    "attributes of open files": ("f = open('/box/x', 'wb')\nwhile True: os.setxattr(f.fileno(), f'user.{len(kept)}', bytes(PIECE)); held(); kept.append(1)", {"error"}),
    "policies of pages": ("libc.syscall(237 if os.uname().machine == 'x86_64' else 235, 0, ctypes.c_size_t(4096), 1, 0, 0, 0)", {"forbidden_call"}),
    "huge pages": ("at = libc.mmap(None, 2 << 20, 3, 0x40021, -1, 0)\nif at == ctypes.c_void_p(-1).value: refused()", {"error"}),
    "locked pages": ("x = mmap.mmap(-1, 8 << 20)\nif libc.mlock(ctypes.addressof(ctypes.c_char.from_buffer(x)), 8 << 20): refused()", {"error"}),
}  # fmt: skip
# what stays below the limit is let be: name -> program that prints "good"
FINE = {
    "private pages": "x = bytearray(80 << 20)\nfill(x, len(x))",
    "threads": "threads = [threading.Thread(target=lambda: kept.append(bytearray(1 << 20))) for _ in range(6)]\nfor one in threads: one.start()\nfor one in threads: one.join()\nassert len(kept) == 6",
    "files": "open('/box/x', 'wb').write(bytes(25 << 20))\nimport shutil; shutil.copyfile('/box/main.py', '/box/y')",
    "a database in a file": "import sqlite3\nwith sqlite3.connect('/box/x') as base: base.execute('create table t as select 7 as seven')\nassert sqlite3.connect('/box/x').execute('select seven from t').fetchall() == [(7,)]",
    "a library that tries another program first": "import platform\nassert platform.uname().processor == ''",
    "copies with attributes": "import shutil\nfor i in range(3): shutil.copy2('/box/main.py', f'/box/{i}')",
    "an event loop": "import asyncio\nasync def f(): await asyncio.sleep(0)\nfor _ in range(30): asyncio.run(f())",
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
    """Return {name: outcome} of programs that a single-threaded process runs in the sandbox."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(time_s), str(memory_mb)], input=json.dumps({name: START + text for name, text in programs.items()}),
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(map(json.loads, ran.stdout.splitlines()))


@pytest.fixture(scope="module")
def outcomes():
    return run_all({name: program for name, (program, _) in WAYS.items()}, time_s=60.0)


@pytest.mark.parametrize("name", WAYS)
def test_sandboxed_program_cannot_exceed_its_memory_limit_by_any_kind_of_allocation(outcomes, name):
    outcome = outcomes[name]
    assert outcome["stdout"].count(".") / 4 <= LIMIT_MB
    assert (outcome["stopped"] or ("error" if outcome["exit_code"] else "fine")) in WAYS[name][1], outcome


def test_sandboxed_programs_within_the_memory_limit_succeed():
    outcomes = run_all({name: f"{program}\nprint('good')" for name, program in FINE.items()}, time_s=30.0)
    assert {name: outcome["stdout"] for name, outcome in outcomes.items()} == dict.fromkeys(FINE, "good\n"), outcomes
