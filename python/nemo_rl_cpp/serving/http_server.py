"""The HTTP server (uvicorn with h11 in a thread), and the reading of request bodies up to a size and a time limit."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from nemo_rl_cpp.serving.bodies import RequestError

_START_SECONDS = 15.0
_END_SECONDS = 5.0
_IDLE_SECONDS = 75  # how long a connection may idle between two requests
_LONGEST_HEAD = 64 << 10


def listen(host: str, port: int, where: str = "--host and --port") -> socket.socket:
    """Return a socket that listens at `host` and `port`. Raise ValueError if nothing can listen there; its message
    names the options that set the address (`where`)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"{where}: nothing can listen at {host}:{port} ({error.strerror}); choose another port, or 0 for a free one"
        ) from None


class HttpServer:
    """A server of an ASGI application on a listening socket, in a thread. With the `log_level` "error", uvicorn writes
    exceptions of handlers to stderr. Beyond `most_connections`, requests get status 503."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        *,
        log_level: str = "critical",
        most_connections: int | None = 2048,
    ) -> None:
        self._listener = listener
        self.host, self.port = listener.getsockname()[:2]
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
            log_level=log_level, timeout_keep_alive=_IDLE_SECONDS, limit_concurrency=most_connections,
            h11_max_incomplete_event_size=_LONGEST_HEAD, timeout_graceful_shutdown=int(_END_SECONDS), server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The server's address for clients, without the /v1 of the routes."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Serve in a thread, and return once requests are accepted. Raise RuntimeError if that takes long."""
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RuntimeError(f"the HTTP server at {self.url} did not start within {_START_SECONDS:g} s")
            time.sleep(0.005)

    def _serve(self) -> None:
        with self._listener:
            asyncio.run(self._server.serve(sockets=[self._listener]))

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stop accepting requests, wait briefly for unfinished ones, and end. Any thread may call it, repeatedly."""
        self._server.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _END_SECONDS)
            self._server.force_exit = True


class Engine(Protocol):
    """The interface of the thread that computes the responses of a server."""

    def is_alive(self) -> bool: ...
    def shut_down(self) -> None: ...


def serve_until_ended(server: HttpServer, engine: Engine, greet: Callable[[], None]) -> None:
    """Start the server, call `greet`, and serve until Ctrl-C or SIGTERM; then stop the server and the engine."""
    ended = threading.Event()
    before = {n: signal.signal(n, lambda *_: ended.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        greet()
        wait_for_end(ended, server, engine)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.stop()
        engine.shut_down()


def wait_for_end(ended: threading.Event, server: HttpServer, engine: Engine, every: float = 1.0) -> None:
    """Wait until `ended` is set. Raise RuntimeError if the server's or the engine's thread has died."""
    while not ended.wait(every):
        for name, thread in (("HTTP server", server), ("engine", engine)):
            if not thread.is_alive():
                raise RuntimeError(f"the {name} has ended by itself; its last words are above: start the server again")


# ---- request bodies


async def read_raw(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Return a request's body. Raise RequestError if it exceeds `most_bytes` (status 413) or `seconds` (408)."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                # a body that is too long is read to its end: if a connection is closed before, the client sees a reset
                # connection instead of the error
                if size <= most_bytes:
                    pieces.append(piece)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {seconds:g} s", 408) from None
    if size > most_bytes:
        raise RequestError(f"the body has more than {most_bytes} bytes, the server's limit", 413)
    return b"".join(pieces)


async def read_json(request: Request, most_bytes: int, seconds: float) -> object:
    """Return a request's JSON body. Raise RequestError if invalid, or for lone surrogates and non-finite numbers."""
    raw = await read_raw(request, most_bytes, seconds)

    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is no JSON number")

    try:
        data = json.loads(raw, parse_constant=no_constant)
        if b"\\ud" in raw.lower():  # a lone surrogate cannot be encoded
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is no JSON: {text[:200]}") from None
