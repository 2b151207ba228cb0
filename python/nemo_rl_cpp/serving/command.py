"""The command `serve`: a model, or a run's checkpoint, behind the routes of OpenAI and vLLM."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from nemo_rl_cpp.command_line import add_engine_options, add_model_option
from nemo_rl_cpp.serving.engine import EngineThread

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.http_server import HttpServer

KEY_VARIABLE = "NEMO_RL_CPP_API_KEY"
INSTALL = "pip install 'nemo-rl-cpp[serve]'"
_PACKAGES = ("starlette", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    add_model_option(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="by which clients may call it too")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    parser.add_argument(
        "--api-key", help=f"that requests must carry as a bearer token (default: the variable {KEY_VARIABLE}, or none)"
    )
    add_engine_options(parser)
    parser.add_argument("--seed", type=int, default=42, help="of requests that name a rollout and no seed")
    parser.add_argument(
        "--max-model-len", type=int, help="longest sequence (default: what the model and the cache allow)"
    )
    parser.add_argument(
        "--kv-cache-gb", type=float, help="memory of keys and values (default: half of what is free, 4 at most)"
    )
    parser.add_argument("--max-batch-size", type=int, default=64, help="answers that are generated at the same time")
    parser.add_argument(
        "--max-queue", type=int, default=1024, help="answers under way or waiting; more are refused (503)"
    )
    parser.add_argument("--max-body-mb", type=float, default=8.0, help="size of a request")
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds for an answer")


def check_installed(what: str) -> None:
    """ValueError where the packages of the extra `serve` are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs the package {' and '.join(missing)}: run `{INSTALL}`")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM. Returns the exit status."""
    check_installed("nemo-rl-cpp serve")
    _check(arguments)
    import torch

    from nemo_rl_cpp.serving.http_server import HttpServer, listen
    from nemo_rl_cpp.serving.model import EngineSizes, Limits, load_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    listener = listen(arguments.host, arguments.port)  # a port that is taken is said before a model is loaded
    limits = Limits(
        max_queue=arguments.max_queue, max_body_bytes=int(arguments.max_body_mb * (1 << 20)), request_timeout_s=arguments.request_timeout
    )  # fmt: skip
    sizes = EngineSizes(arguments.max_model_len, arguments.kv_cache_gb, arguments.max_batch_size)
    model = load_model(
        arguments.model, served_name=arguments.served_model_name, precision=arguments.precision, sizes=sizes, limits=limits,
        seed=arguments.seed,
    )  # fmt: skip
    key = arguments.api_key or os.environ.get(KEY_VARIABLE) or None
    server = HttpServer(model, listener, key)
    ended = threading.Event()
    before = {n: signal.signal(n, lambda *_: ended.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        if key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"warning: whoever reaches {arguments.host} may use this server: give it --api-key", file=sys.stderr)
        print(
            f"serving {model.names[0]} at {server.url}/v1 (weights {model.engine.state.version}, digest {model.digest}, "
            f"sequences of up to {model.max_model_len} tokens); Ctrl-C ends it",
            flush=True,
        )
        wait_for_end(ended, server, model.engine)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.stop()
        model.engine.shut_down()
    return 0


def wait_for_end(ended: threading.Event, server: HttpServer, engine: EngineThread, every: float = 1.0) -> None:
    """Until `ended` is set. RuntimeError where a thread has died, without which nothing is answered."""
    while not ended.wait(every):
        for name, thread in (("HTTP server", server), ("engine", engine)):
            if not thread.is_alive:
                raise RuntimeError(f"the {name} has ended by itself; what it said is above: start the server again")


def _check(arguments: argparse.Namespace) -> None:
    least = {
        "port": 0, "threads": 1, "seed": 0, "max_model_len": 2, "max_batch_size": 1, "max_queue": 1,
    }  # fmt: skip
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected at least {smallest}")
    if arguments.port > 65535:
        raise ValueError(f"--port is {arguments.port}: expected at most 65535")
    for name in ("kv_cache_gb", "max_body_mb", "request_timeout"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e9:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected a positive number")
    if arguments.api_key is not None and not arguments.api_key.strip():
        raise ValueError("--api-key is empty: give a key, or leave it out")
