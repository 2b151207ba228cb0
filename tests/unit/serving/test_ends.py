import threading
from types import SimpleNamespace

import pytest
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.serving import generation as attach
from nemo_rl_cpp.serving.engine import Draw, EngineThread, PendingRequest, Sampling
from nemo_rl_cpp.serving.http_server import listen, wait_for_end


class Stuck:
    """A fake engine whose step does not end before `go` is set."""

    used_blocks = num_blocks = generated_tokens = 0

    def __init__(self):
        self.go, self.began = threading.Event(), threading.Event()

    def submit(self, *args, **kwargs):
        return 0

    def step(self):
        self.began.set()
        self.go.wait(60)
        return [], [], [], []

    def cancel(self, number):
        pass


def test_closing_a_serving_engine_raises_if_its_current_step_hangs():
    stuck = Stuck()
    engine = EngineThread(lambda: stuck)
    engine.step_seconds = 0.01
    engine.submit(PendingRequest([1], Sampling(), Draw(0), lambda progress: None))
    assert stuck.began.wait(30)
    with pytest.raises(RuntimeError, match="made no step within 0.01 s"):
        engine.close(0.01)
    stuck.go.set()
    engine.shut_down()
    assert not engine.is_alive()


@pytest.mark.parametrize("broken", ["HTTP server", "engine"])
def test_serve_command_ends_with_an_error_if_the_server_or_engine_thread_ends(broken):
    server, engine = (SimpleNamespace(is_alive=lambda name=name: name != broken) for name in ("HTTP server", "engine"))
    with pytest.raises(RuntimeError, match=f"the {broken} has ended"):
        wait_for_end(threading.Event(), server, engine, every=0.001)
    ended = threading.Event()
    ended.set()
    wait_for_end(ended, server, engine)


def test_failed_server_start_stops_the_engine_and_closes_the_socket(monkeypatch):
    config = PolicyConfig(model_name="tiny-random", generation={"expose_http_server": True, "http_server": {"port": 0}})
    listener = attach.listener_of(config)
    with pytest.raises(ValueError, match="nothing can listen"):
        listen("127.0.0.1", listener.getsockname()[1], "x")
    engine = EngineThread(Stuck)
    monkeypatch.setattr(attach, "_model", lambda *args: SimpleNamespace(engine=engine, limits=None))
    inner = object.__new__(NativeGeneration)
    monkeypatch.setattr("nemo_rl_cpp.serving.http_server.HttpServer.start", pytest.fail)
    with pytest.raises(pytest.fail.Exception):
        attach.serve_policy(None, inner, config, lambda: 0, 1, listener)
    assert not engine.is_alive() and listener.fileno() == -1
    assert attach.listener_of(PolicyConfig(model_name="tiny-random")) is None
