"""The process of the tests that forks workers."""

import socket

import pytest
from forked_workers import Forker


def test_starting_a_worker_is_an_error_if_the_fork_server_process_has_ended():
    forker = object.__new__(Forker)
    forker._socket, theirs = socket.socketpair()
    with forker._socket, theirs:
        theirs.shutdown(socket.SHUT_WR)  # it has read the request, and does not answer
        with pytest.raises(ChildProcessError, match="has ended: this one was not started"):
            forker.start(["nemo_rl_cpp.distributed.worker", "0"], pass_fds=[theirs.fileno()], env={})
