"""The worker process behind `verifier_pool`: `python -m nemo_rl_cpp.environments.verifier_process module:Class options`.

Requests come pickled on standard input; answers go as JSON to standard output, each after its length. The texts that are
judged come from a model: whatever they make this process do, its answers cannot make the other side run anything.
"""

import fcntl
import importlib
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
from functools import reduce
from io import RawIOBase
from typing import BinaryIO, TypedDict

HEADER = struct.Struct("<Q")
PARENT_CHECK_SECONDS = 5.0
Request = tuple[str, object, dict[str, object]]
"""A response, its truth, and what else the verifier takes."""


class Reply(TypedDict, total=False):
    """What the process says: that it is ready (its process id), or score and answer of a response, or what went wrong."""

    ready: int
    score: float
    answer: str | None
    unmatchable: int
    error: str


def write_message(stream: BinaryIO, message: Reply) -> None:
    """Length and JSON, flushed."""
    payload = json.dumps(message).encode()
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


def read_request(raw: RawIOBase) -> Request:
    """The next request; EOFError when the other side has closed."""
    return pickle.loads(_read_exactly(raw, HEADER.unpack(_read_exactly(raw, HEADER.size))[0]))


def _read_exactly(raw: RawIOBase, size: int) -> bytes:
    """Exactly so many bytes from a raw pipe: a buffer would hide from select what it has read ahead."""
    parts = []
    while size > 0:
        part = raw.read(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait_for_parent(parent: int, fd: int) -> None:
    """Until there is something to read; ends the process when the parent is gone without closing its pipe."""
    while not select.select([fd], [], [], PARENT_CHECK_SECONDS)[0]:
        if os.getppid() != parent:
            os._exit(0)


class _Lifeline:
    """Ends this process at once when the other side has gone, also in the middle of a computation that never returns.

    The kernel sends SIGIO, which ends a process, when the last holder of a pipe's other end closes it: when the trainer was
    killed, too. It sends the same when something comes in, so it is listened to only while nothing is to come. (A signal at
    the parent's death, PR_SET_PDEATHSIG, would come when the thread ends that started this process.)
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)

    def hold(self) -> None:
        """From here on nothing comes in."""
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        closed = select.poll()
        closed.register(self._fd, 0)
        if closed.poll(0):
            os._exit(0)

    def let_go(self) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)


def _limit_memory(megabytes: int) -> None:
    """Address space beyond what the process has now; allocations above fail with MemoryError."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(target: str, options_json: str) -> None:
    """Constructs the verifier, says that it is ready, and judges one response a request until its input closes."""
    options = json.loads(options_json)
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    lifeline = _Lifeline(requests.fileno())
    lifeline.hold()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a verifier that prints must not write into the answers

    module, _, name = target.partition(":")
    verifier = reduce(getattr, name.split("."), importlib.import_module(module))()
    if hasattr(verifier, "warm_up"):
        verifier.warm_up(**options["warm_up"])
    if options["memory_mb"] is not None and os.path.exists("/proc/self/statm"):
        _limit_memory(options["memory_mb"])
    lifeline.let_go()
    write_message(answers, {"ready": os.getpid()})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)

    while True:
        _wait_for_parent(parent, requests.fileno())
        try:
            response, truth, kwargs = read_request(requests)
        except EOFError:
            os._exit(0)
        lifeline.hold()
        # The kernel ends a process that computes long past its deadline, should nobody be left to kill it.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, 2 * options["deadline_s"] + 1)
        before = getattr(verifier, "unmatchable", 0)
        try:
            scores, found = verifier.verify([response], [truth], return_extracted_answer=True, **kwargs)
            answer: Reply = {"score": float(scores[0]), "answer": None if found[0] is None else str(found[0])}
            if getattr(verifier, "unmatchable", 0) > before:
                answer["unmatchable"] = 1
        except Exception as error:  # a verifier scores what goes wrong with a response 0; this is a mistake in its use
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        lifeline.let_go()
        write_message(answers, answer)


if __name__ == "__main__":
    main(*sys.argv[1:3])
