"""The worker process of `verifier_pool`: `python -m nemo_rl_cpp.environments.verifier_process module:Class options`.

Standard output is a socket for requests and replies, standard input a pipe that closes when the parent ends. Requests are
pickled, replies are JSON. The scored texts come from a model: whatever they make this process do, its replies cannot make
the parent run code."""

import fcntl
import importlib
import json
import os
import pickle
import resource
import select
import sys
from functools import reduce
from multiprocessing.connection import Connection
from typing import TypedDict

Request = tuple[str, object, dict[str, object]]  # (response, ground truth, keyword arguments of the verifier)


class Reply(TypedDict, total=False):
    """A message from the worker process, which has either `ready` (the process id, once it has started), or `error`, or
    the keys `score`, `answer` and `unmatchable` of a response."""

    ready: int
    score: float
    answer: str | None
    unmatchable: bool
    error: str


def _end_with_the_parent() -> None:
    """End this process as soon as the parent has ended, even during a computation that never returns.

    When the other end of standard input closes, the kernel sends SIGIO, which ends a process. (PR_SET_PDEATHSIG would
    report the end of a thread, not of the parent.)"""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(0, 0)
    if closed.poll(0):
        os._exit(0)


def _limit_memory(megabytes: int) -> None:
    """Limit the address space of this process to its current size plus `megabytes`."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(target: str, options_json: str) -> None:
    """Make the verifier `target` (module:Class), report that it is ready, and score one response per request."""
    options = json.loads(options_json)
    _end_with_the_parent()
    parent = Connection(os.dup(1))
    os.dup2(2, 1)  # a verifier that prints must not write into the replies

    module, _, name = target.partition(":")
    verifier = reduce(getattr, name.split("."), importlib.import_module(module))()
    if hasattr(verifier, "warm_up"):
        verifier.warm_up(**options["warm_up"])
    if options["memory_mb"] is not None and os.path.exists("/proc/self/statm"):
        _limit_memory(options["memory_mb"])
    parent.send_bytes(json.dumps({"ready": os.getpid()}).encode())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)

    while True:
        response, truth, kwargs = pickle.loads(parent.recv_bytes())
        try:
            score, answer, unmatchable = verifier.verify(response, truth, **kwargs)
            found = None if answer is None else str(answer)
            reply: Reply = {"score": float(score), "answer": found, "unmatchable": unmatchable}
        except Exception as error:  # a usage error, because a verifier gives a faulty response score 0
            reply = {"error": f"{type(error).__name__}: {error}"}
        parent.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(*sys.argv[1:3])
