"""The trainer's end of vLLM's process, without one: a socket answers in its place."""

import gc
import os
import socket
import weakref

import pytest
import torch
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm.process import VllmError, VllmProcess
from nemo_rl_cpp.models.generation.vllm.vllm_generation import worker_environment
from nemo_rl_cpp.models.generation.vllm.weights import WeightBuffer
from nemo_rl_cpp.models.generation.vllm.worker_script import send_frame


@pytest.fixture
def ends():
    """A process, the other end of its connection, and how often it was ended."""
    process, killed = VllmProcess.__new__(VllmProcess), []
    process._timeout, process._starting = 5.0, False
    process._connection, theirs = socket.socketpair()
    process._finalizer = weakref.finalize(process, killed.append, True)
    yield process, theirs, killed
    process._connection.close()
    theirs.close()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, ValueError])
def test_an_error_of_the_callers_callback_ends_it(ends, error):
    process, theirs, killed = ends
    send_frame(theirs, {"event": "step"}, b"")
    send_frame(theirs, {"event": "done", "of": "the first call"}, b"")

    def fails(message, payload):
        raise error("of a reward function")

    with pytest.raises(error, match="of a reward function"):
        process.call("generate", on_step=fails)
    assert killed
    with pytest.raises(WorkerLostError, match="has been ended"):  # and never the answer to the first call
        process.call("generate")


def test_what_vllm_cannot_do_leaves_it_alive(ends):
    process, theirs, killed = ends
    send_frame(theirs, {"event": "error", "text": "no", "trace": ""}, b"")
    send_frame(theirs, {"event": "done", "of": "the second call"}, b"")
    with pytest.raises(VllmError, match="vLLM, generate: no"):
        process.call("generate")
    assert process.call("generate")["of"] == "the second call" and not killed


def test_the_memory_of_weights_goes_with_its_owner():
    buffer = WeightBuffer({"a": torch.ones(3)})
    descriptor = buffer.descriptor
    os.fstat(descriptor)
    del buffer
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_null_takes_a_variable_away(monkeypatch):
    monkeypatch.setenv("PROXY", "somewhere")
    given = worker_environment({"PROXY": None, "HF_HUB_OFFLINE": None, "VLLM_NO_USAGE_STATS": 0})
    assert "PROXY" not in given and "HF_HUB_OFFLINE" not in given and given["VLLM_NO_USAGE_STATS"] == "0"
    assert worker_environment(None)["PROXY"] == "somewhere" and given["PATH"] == os.environ["PATH"]
