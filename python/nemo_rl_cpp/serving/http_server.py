"""The HTTP server: uvicorn on h11, in a thread or in the foreground, with deadlines for what clients leave unfinished."""

import asyncio
import contextlib
import socket
import threading
import time

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_rl_cpp.serving.app import make_app
from nemo_rl_cpp.serving.model import ServedModel

_START_SECONDS = 15.0
_END_SECONDS = 5.0
_IDLE_SECONDS = 75.0  # a connection between two requests
_SWEEP_SECONDS = 0.5
_LONGEST_HEAD = 64 << 10


def listen(host: str, port: int, where: str = "--host and --port") -> socket.socket:
    """A socket that listens there; port 0 takes a free one. ValueError where that cannot be, which names the options `where`."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise ValueError(f"{where}: there is no address {host} ({error})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"{where}: nothing can listen at {host}:{port} ({error.strerror}); choose another port, or 0 for a free one"
        ) from None
    return listener


class HttpServer:
    """Serves a model at a listening socket until `stop`.

    Args:
        api_key: that requests must carry; None: none.
    """

    def __init__(self, model: ServedModel, listener: socket.socket, api_key: str | None = None) -> None:
        self.model, self._listener = model, listener
        self.host, self.port = listener.getsockname()[:2]
        config = uvicorn.Config(
            make_app(model, api_key), http="h11", ws="none", lifespan="off", loop="asyncio", log_config=None, access_log=False,
            log_level="critical", timeout_keep_alive=int(_IDLE_SECONDS), limit_concurrency=model.limits.max_connections,
            h11_max_incomplete_event_size=_LONGEST_HEAD, timeout_graceful_shutdown=int(_END_SECONDS), server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where clients find it, without the route's /v1."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host and "[" not in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Serves in a thread of its own, from the return of this call on."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()), name="http", daemon=True)
        self._thread.start()
        end = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise RuntimeError(f"the HTTP server at {self.url} did not start within {_START_SECONDS:g} s")
            time.sleep(0.005)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def serve(self) -> None:
        """Serves in this event loop."""
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper
            self._listener.close()

    def stop(self) -> None:
        """Takes no more requests, waits a little for those under way, and ends. Safe to call twice, from any thread."""
        self._server.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _END_SECONDS)
            self._server.force_exit = True

    async def _sweep(self) -> None:
        """Cuts connections whose request's head does not come, and those that are closed and not read."""
        since: dict[H11Protocol, float] = {}
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            waits = {c for c in list(self._server.server_state.connections) if _is_unfinished(c)}
            since = {c: since.get(c, now) for c in waits}
            for connection, begun in since.items():
                if now - begun > self.model.limits.header_timeout_s and connection.transport is not None:
                    connection.transport.abort()


def _is_unfinished(connection: H11Protocol) -> bool:
    """Whether a connection is closed and still holds data, has sent part of a head, or nothing yet, or goes on with a body that was
    refused."""
    if connection.transport is None:
        return False
    if connection.transport.is_closing():
        return True
    if connection.cycle is None:
        return True
    state, more = connection.conn.their_state, connection.conn.trailing_data[0]
    return connection.cycle.response_complete and (state is not h11.IDLE or bool(more))
