"""HTTP calls to a vLLM server, with timeouts."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from nemo_rl_cpp.distributed.worker_calls import WorkerLostError

_MOST_OF_A_TEXT = 600
_LARGEST_ANSWER = 1 << 28


class VllmError(RuntimeError):
    """Raised if vLLM could not execute a request; its server still runs."""


class ServerStatusError(VllmError):
    """Raised if the server rejects a call with the HTTP status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A client of a vLLM server.

    Args:
        url: http://host:port, optionally with a path prefix of the routes.
        key: sent as `Authorization: Bearer`; None: no key.
        timeout: seconds without received data after which a call fails.
        why: function that returns a text on why the server no longer responds, which is appended to the error message.
    """

    def __init__(self, url: str, key: str | None, timeout: float, why: Callable[[], str] = lambda: "") -> None:
        parts = urlsplit(url)
        self.url, self._host, self._port, self._path = url, parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.timeout, self._why = timeout, why
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._given_up = False

    def call(self, what: str, method: str, path: str, body: object = None) -> dict:
        """Return the server's response; `{}` if it is not a JSON object. `what` describes the call in error messages.

        Raises ServerStatusError if the server rejects the call, WorkerLostError if it is unreachable or times out.
        """
        with self._asked(what, method, path, body) as response, self._told(what):
            return _event(response.read(_LARGEST_ANSWER)) or {}

    def stream(self, what: str, path: str, body: object) -> Iterator[dict]:
        """Yield the events of a response until the server ends it. If the generator is closed early, it closes the
        connection, and vLLM aborts the request. Raises the errors of `call`, and VllmError for an error event."""
        with self._asked(what, "POST", path, body) as response:
            while True:
                with self._told(what):
                    line = response.readline(_LARGEST_ANSWER)
                if not line:
                    raise self._lost(what, ConnectionError("the answer has no end"))
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                event = _event(text)
                if event is None:
                    raise self._lost(what, ValueError("what came is no event"))
                if "error" in event:
                    raise VllmError(f"vLLM at {self.url}, {what}: {_message_of(event)}")
                yield event

    def give_up(self) -> None:
        """Close all connections, so that calls in progress fail and vLLM aborts their requests. New calls fail, too."""
        with self._lock:
            self._given_up, open_ones = True, list(self._open)
        for one in open_ones:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def take_up(self) -> None:
        """Allow new calls again after `give_up`."""
        with self._lock:
            self._given_up = False

    @contextlib.contextmanager
    def _asked(self, what: str, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        connection, its_socket = self._kind(self._host, self._port, timeout=self.timeout), None
        try:
            with self._told(what):
                connection.connect()
                its_socket = connection.sock
                with self._lock:
                    if self._given_up:
                        raise ConnectionAbortedError("the call was given up")
                    self._open.add(its_socket)
                payload = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, payload, self._headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise self._refused(what, f"{method} {path}", response)
            yield response
        finally:
            with self._lock:
                self._open.discard(its_socket)
            connection.close()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(what, error) from error

    def _refused(self, what: str, call: str, response: http.client.HTTPResponse) -> ServerStatusError:
        text = response.read(1 << 16)
        event = _event(text)
        said = text.decode(errors="replace")[:_MOST_OF_A_TEXT] if event is None else _message_of(event)
        return ServerStatusError(
            f"vLLM at {self.url}, {what}: {call} has status {response.status}: {said}", response.status
        )

    def _lost(self, what: str, error: BaseException) -> WorkerLostError:
        if isinstance(error, TimeoutError):
            how = f"gave no sign of life for {self.timeout:g} s (policy.generation.vllm_cfg.timeout_s)"
        elif isinstance(error, ConnectionRefusedError):
            how = "is not there: nobody listens at this address"
        elif isinstance(error, socket.gaierror):
            how = f"cannot be found: there is no host {self._host}"
        else:
            how = f"is gone, or answered with what is no answer ({type(error).__name__}: {error})"
        return WorkerLostError(f"vLLM at {self.url} {how}; it was doing: {what}{self._why()}")


def _event(text: bytes) -> dict | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _message_of(body: dict) -> str:
    """Return the message in the body of an error response, which has the format of OpenAI's servers, of FastAPI or of
    vLLM's own routes."""
    error = body.get("error", body.get("detail", body))
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MOST_OF_A_TEXT]
